package cluster

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

const (
	registryAddress  = "172.30.0.1:5000" // the hub's
	registryRole     = "REGISTRY"        // in the environment: this program is the registry
	registryUser     = "puller"
	registryPassword = "s3cr3t"
)

// blob is one file of the registry, with its media type.
type blob struct {
	kind string
	data []byte
}

func (b blob) digest() string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b.data)) }

func (b blob) descriptor() map[string]any {
	return map[string]any{"mediaType": b.kind, "digest": b.digest(), "size": len(b.data)}
}

// privateImage is an image of busybox alone.
func privateImage() (manifest, config, layer blob, err error) {
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return manifest, config, layer, err
	}
	archive := &bytes.Buffer{}
	w := tar.NewWriter(archive)
	if err = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "bin/busybox", Mode: 0o755, Size: int64(len(busybox))}); err != nil {
		return manifest, config, layer, err
	}
	if _, err = w.Write(busybox); err != nil {
		return manifest, config, layer, err
	}
	if err = w.Close(); err != nil {
		return manifest, config, layer, err
	}
	const oci = "application/vnd.oci.image."
	layer = blob{oci + "layer.v1.tar", archive.Bytes()}
	encode := func(kind string, object any) blob {
		data, failed := json.Marshal(object)
		if failed != nil {
			err = failed
		}
		return blob{oci + kind, data}
	}
	config = encode("config.v1+json", map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{"Entrypoint": []string{"/bin/busybox", "sleep", "1000"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{layer.digest()}},
	})
	manifest = encode("manifest.v1+json", map[string]any{
		"schemaVersion": 2, "mediaType": oci + "manifest.v1+json",
		"config": config.descriptor(), "layers": []any{layer.descriptor()},
	})
	return manifest, config, layer, err
}

// serveRegistry serves the image to who knows the password.
func serveRegistry() error {
	manifest, config, layer, err := privateImage()
	if err != nil {
		return err
	}
	files := map[string]blob{
		"/v2/private/manifests/1": manifest, "/v2/private/manifests/" + manifest.digest(): manifest,
		"/v2/private/blobs/" + config.digest(): config, "/v2/private/blobs/" + layer.digest(): layer,
	}
	return http.ListenAndServe(registryAddress, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		if user != registryUser || password != registryPassword {
			w.Header().Set("WWW-Authenticate", `Basic realm="private"`)
			http.Error(w, "who are you?", http.StatusUnauthorized)
			return
		}
		file, found := files[r.URL.Path]
		if !found {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", file.kind)
		w.Header().Set("Docker-Content-Digest", file.digest())
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(file.data))
	}))
}

// startRegistry runs this program as a registry in the network between the nodes.
func startRegistry(t *testing.T) {
	t.Helper()
	data, err := os.ReadFile(nodeRoot + "/" + clusterName + "/cluster.json")
	check(t, err)
	var cluster struct {
		Hub struct {
			PID int `json:"pid"`
		} `json:"hub"`
	}
	check(t, json.Unmarshal(data, &cluster))
	self, err := os.Executable()
	check(t, err)
	command := exec.Command("nsenter", "-t", fmt.Sprint(cluster.Hub.PID), "-n", "--", self)
	command.Env = append(os.Environ(), registryRole+"=1")
	command.Stderr = os.Stderr
	check(t, command.Start())
	t.Cleanup(func() {
		command.Process.Kill() // it serves until then
		command.Wait()
	})
}

func TestImagePullSecret(t *testing.T) {
	s := newSpace(t)
	startRegistry(t)
	hosts := fmt.Sprintf("server = \"http://%s\"\n", registryAddress)
	onClusterIn(t, hosts, "exec", node2, "sh", "-c", "mkdir -p /etc/minicri/certs.d/"+registryAddress+" && cat >/etc/minicri/certs.d/"+registryAddress+"/hosts.toml")
	s.kubectl("create", "secret", "docker-registry", "good", "--docker-server="+registryAddress, "--docker-username="+registryUser, "--docker-password="+registryPassword)
	s.kubectl("create", "secret", "docker-registry", "bad", "--docker-server="+registryAddress, "--docker-username="+registryUser, "--docker-password=wrong")
	for _, secret := range []string{"bad", "good"} {
		s.apply(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  nodeName: node2
  terminationGracePeriodSeconds: 0
  imagePullSecrets: [{name: %s}]
  containers: [{name: main, image: "%s/private:1", imagePullPolicy: Always}]
`, secret, secret, registryAddress))
		if secret == "bad" {
			pod := s.await("bad", "its pull is refused", func(pod *corev1.Pod) bool {
				waiting := status(pod, "main").State.Waiting
				return waiting != nil && (waiting.Reason == "ErrImagePull" || waiting.Reason == "ImagePullBackOff")
			})
			if message := status(pod, "main").State.Waiting.Message; strings.Contains(message, "wrong") {
				t.Errorf("the password is in %q", message)
			}
		}
	}
	s.ready("good")
}
