package hostile

import (
	"bytes"
	"encoding/base64"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
)

// attack: images: RemoveImage, ImageStatus, PullImage and ListImages with a runtime handler that the node does not have; annotations of a pod
// held: the handler is refused by name, the annotations change nothing
//
// cri: Image.spec ImageSpec.annotations ImageSpec.runtime_handler
func TestRuntimeHandlerOfImageCalls(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox() // makes the directories of the image store
	content, host := newRegistry(t, n)
	m := content.Image(ocispec.ImageConfig{}, registry.Layer(registry.File("a", 0o644, "x")))
	content.Manifest("plain:1", m.MediaType, m)
	unknown := &runtimeapi.ImageSpec{Image: host + "/plain:1", RuntimeHandler: "no-such-handler"}
	ctx := limited(t)
	_, pull := n.Image.PullImage(ctx, &runtimeapi.PullImageRequest{Image: unknown})
	_, look := n.Image.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: unknown})
	_, remove := n.Image.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: unknown})
	_, list := n.Image.ListImages(ctx, &runtimeapi.ListImagesRequest{Filter: &runtimeapi.ImageFilter{Image: unknown}})
	for name, err := range map[string]error{"pull": pull, "status": look, "remove": remove, "list": list} {
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "no-such-handler") {
			t.Errorf("%s: %v", name, err)
		}
	}
	known := &runtimeapi.ImageSpec{Image: host + "/plain:1", RuntimeHandler: "runc", Annotations: map[string]string{"of.the/pod": "x"}}
	_, err := n.Image.PullImage(ctx, &runtimeapi.PullImageRequest{Image: known})
	check(t, err)
	answer, err := n.Image.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: known})
	check(t, err)
	if spec := answer.GetImage().GetSpec(); spec.GetRuntimeHandler() != "" || len(spec.GetAnnotations()) != 0 {
		t.Errorf("Image.spec: %v", spec)
	}
	_, err = n.Image.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: known})
	check(t, err)
}

// attack: images: a setuid program and a device node, in a layer and in a volume of the image, looked for by a local user of the node who knows every path
// held: not one can be reached; the volume has no device node
// field: CVE-2021-41103 of containerd; its volumes still hold the device nodes
func TestNothingOfAnImageIsReachableOnTheNode(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox()
	content, host := newRegistry(t, n)
	program, err := os.ReadFile("/bin/busybox")
	check(t, err)
	m := content.Image(
		ocispec.ImageConfig{Env: []string{"PATH=/bin"}, Volumes: map[string]struct{}{"/data": {}}},
		registry.Layer(
			registry.Dir("bin", 0o755, 0), registry.File("bin/sleep", 0o755, string(program)), registry.File("bin/stat", 0o755, string(program)), registry.File("bin/suid", 0o4755, string(program)), registry.Device("mem", 0o666, 1, 1),
			registry.Dir("data", 0o777, 0), registry.File("data/suid", 0o4755, string(program)), registry.Device("data/mem", 0o666, 1, 1),
		))
	content.Manifest("suid:1", m.MediaType, m)
	_, err = pull(t, n, host+"/suid:1", nil)
	check(t, err)
	var found []string
	for name, options := range map[string][]harness.PodOption{"suid": nil, "suid-userns": {harness.UserNamespace}} {
		p := newTenant(t, n, name, options...)
		id := p.run("c", func(c *runtimeapi.ContainerConfig) { c.Image.Image = host + "/suid:1" })
		if code, output := run(t, n, id, "/bin/stat", "-c", "%u:%a", "/bin/suid", "/data"); code != 0 || output != "0:4755\n0:777\n" {
			t.Errorf("%s: the container's own view: %d, %s", name, code, output)
		}
		found = append(found, filepath.Join(n.State, "containers", id, "config.json"))
		_, err := os.Lstat(found[len(found)-1])
		check(t, err) // else it would prove nothing
	}
	found = append(found, dangerous(t, n.Root, n.State)...)
	if len(found) < 2+2*3 {
		t.Fatalf("the attack is not in place: %q", found)
	}
	for _, path := range found {
		if strings.Contains(path, "container-volumes") && strings.HasSuffix(path, "/mem") {
			t.Errorf("a device node was copied into a volume: %s", path)
		}
	}
	if reached := asNobody(t, found); reached != "" {
		t.Errorf("a local user reaches:\n%s", reached)
	}
	_, err = n.Image.RemoveImage(limited(t), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: host + "/suid:1"}})
	check(t, err)
}

// dangerous finds setuid programs and device nodes. Whiteouts (device 0:0) are
// none.
func dangerous(t testing.TB, roots ...string) (paths []string) {
	t.Helper()
	for _, root := range roots {
		check(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if os.IsNotExist(err) {
				return nil
			}
			if err != nil {
				return err
			}
			info, err := entry.Info()
			if err != nil {
				return nil //nolint:nilerr // it is gone
			}
			device := info.Mode()&fs.ModeDevice != 0 && info.Sys().(*syscall.Stat_t).Rdev != 0
			if device || info.Mode()&fs.ModeSetuid != 0 {
				paths = append(paths, path)
			}
			return nil
		}))
	}
	return paths
}

// asNobody returns which of the paths uid 65534 reaches.
func asNobody(t testing.TB, paths []string) string {
	t.Helper()
	command := exec.Command("/bin/sh", "-c", `while read -r path; do [ ! -e "$path" ] || echo "$path"; done`)
	command.Stdin = strings.NewReader(strings.Join(paths, "\n") + "\n")
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	var output bytes.Buffer
	command.Stdout, command.Stderr = &output, &output
	check(t, command.Run())
	return output.String()
}

// guard answers as a registry and its token server do that let in who shows the
// password, the registry token, or a token that was got for the identity token.
type guard struct {
	mu    sync.Mutex
	realm string // Bearer with it as realm; Basic without
	shown []string
}

const (
	password      = "Basic dXNlcjpzM2NyZXQ=" // user:s3cret
	registryToken = "Bearer registry-token"
	accessToken   = "Bearer access-token"
)

func (g *guard) hook(w http.ResponseWriter, r *http.Request) (answered bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r.URL.Path == "/token" {
		_ = r.ParseForm()
		g.shown = append(g.shown, "identity "+r.PostForm.Get("refresh_token"))
		if r.PostForm.Get("refresh_token") != "identity-token" {
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}
		_, _ = w.Write([]byte(`{"access_token":"access-token"}`))
		return true
	}
	sent := r.Header.Get("Authorization")
	if sent != "" {
		g.shown = append(g.shown, sent)
	}
	if sent == registryToken || sent == accessToken || sent == password && g.realm == "" {
		return false
	}
	challenge := `Basic realm="registry"`
	if g.realm != "" {
		challenge = `Bearer realm="` + g.realm + `",service="registry"`
	}
	w.Header().Set("WWW-Authenticate", challenge)
	w.WriteHeader(http.StatusUnauthorized)
	return true
}

// reset begins a pull; seen are the credentials that it has shown.
func (g *guard) reset(realm string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.realm, g.shown = realm, nil
}

func (g *guard) seen() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return strings.Join(g.shown, ", ")
}

// Each form of credentials that the CRI has opens the registry that asks for it,
// wrong ones open none, and those of another server are not shown.
//
// cri: AuthConfig.auth AuthConfig.identity_token AuthConfig.password AuthConfig.registry_token
// cri: AuthConfig.server_address AuthConfig.username PullImageRequest.auth PullImageResponse.image_ref
func TestCredentialsOfAPull(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox() // makes the directories of the image store
	content, host := newRegistry(t, n)
	m := content.Image(ocispec.ImageConfig{}, registry.Layer(registry.File("a", 0o644, "x")))
	content.Manifest("private:1", m.MediaType, m)
	g := &guard{}
	content.Answer(g.hook)
	realm := "http://" + host + "/token"
	for _, test := range []struct {
		name, realm string
		auth        *runtimeapi.AuthConfig
		opens       bool
		shown       string
	}{
		{"none", "", nil, false, ""},
		{"username and password", "", &runtimeapi.AuthConfig{Username: "user", Password: "s3cret"}, true, password},
		{"a wrong password", "", &runtimeapi.AuthConfig{Username: "user", Password: "wrong"}, false, "Basic "},
		{"auth", "", &runtimeapi.AuthConfig{Auth: base64.StdEncoding.EncodeToString([]byte("user:s3cret"))}, true, password},
		{"this server's", "", &runtimeapi.AuthConfig{Username: "user", Password: "s3cret", ServerAddress: "http://" + host}, true, password},
		{"another server's", "", &runtimeapi.AuthConfig{Username: "user", Password: "s3cret", ServerAddress: "another.example"}, false, ""},
		{"registry token", realm, &runtimeapi.AuthConfig{RegistryToken: "registry-token"}, true, registryToken},
		{"identity token", realm, &runtimeapi.AuthConfig{IdentityToken: "identity-token"}, true, "identity identity-token, " + accessToken},
		{"a wrong identity token", realm, &runtimeapi.AuthConfig{IdentityToken: "wrong"}, false, "identity wrong"},
	} {
		t.Run(test.name, func(t *testing.T) {
			g.reset(test.realm)
			id, err := pull(t, n, host+"/private:1", test.auth)
			if opened := err == nil && id == m.Config.Digest.String(); opened != test.opens {
				t.Errorf("image %q, error %v", id, err)
			}
			if seen := g.seen(); (seen == "") != (test.shown == "") || !strings.HasPrefix(seen, test.shown) {
				t.Errorf("the registry was shown %q, want %q", seen, test.shown)
			}
			if err != nil && strings.Contains(err.Error(), "s3cret") {
				t.Errorf("the error has the password: %v", err)
			}
			_, err = n.Image.RemoveImage(limited(t), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: host + "/private:1"}})
			check(t, err)
		})
	}
}
