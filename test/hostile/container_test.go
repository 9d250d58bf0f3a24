package hostile

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
	"github.com/minicri/minicri/test/nodetest"
)

// attack: containers: an exec has one argument, or arguments in sum, that are too long for execve
// held: it is refused by the size before any process starts
// field: containerd and CRI-O start the runtime's init, and return its error
func TestExecBeyondWhatExecveTakes(t *testing.T) {
	n := newNode(t)
	id := newTenant(t, n, "large").run("c")
	for _, command := range [][]string{{"true", strings.Repeat("x", 32*4096)}, append([]string{"true"}, make([]string, 1<<20)...)} {
		_, err := n.Runtime.ExecSync(harness.Limited(t), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: command})
		nodetest.WantCode(t, err, codes.InvalidArgument, "execve(2) takes")
		harness.Want(t, len(fmt.Sprint(err)) <= 1024, "the error has %d bytes", len(fmt.Sprint(err)))
	}
	code, output := run(t, n, id, append([]string{"true"}, slices.Repeat([]string{strings.Repeat("<", 32*4096-1)}, 15)...)...)
	harness.Want(t, code == 0, "the largest arguments: %d: %s", code, output)
}

// attack: containers: execs with secrets as arguments fail: no such program, not executable, time-out; also over the streaming server
// held: the log has the program and the number of arguments, but no argument
// field: containerd logs the whole command line
func TestArgumentsOfExecsAreNotLogged(t *testing.T) {
	const secret = "S3CRETEXEC"
	p := newTarget(t)
	for _, command := range [][]string{{"/no/such/program", secret}, {"/etc/hostname", secret}, {"sh", "-c", "sleep 1000", secret}} {
		_, err := p.Runtime.ExecSync(harness.Limited(t), &runtimeapi.ExecSyncRequest{ContainerId: p.container, Cmd: command, Timeout: 1})
		harness.Want(t, err != nil, "%q did not fail", command)
	}
	_, streams := p.begin("/no/such/program", "-a", secret)
	status, err := io.ReadAll(streams[0])
	check(t, err)
	harness.Want(t, strings.Contains(string(status), "Failure"), "the status is %s", status)
	log := p.Log()
	harness.Want(t, !strings.Contains(log, secret), "the log has an argument:\n%s", log)
	for _, want := range []string{"/no/such/program", "/etc/hostname", "permission denied", "with 1 argument", "with 2 arguments", "with 3 arguments"} {
		harness.Want(t, strings.Contains(log, want), "the log lacks %q:\n%s", want, log)
	}
}

// attack: containers: root in a container without stdin, or in an exec, changes the mode of /proc/self/fd/0; also with runc
// held: the node's /dev/null is unchanged; the exec reads the end of its input
// field: runc's exec has the node's /dev/null
func TestNullOfAnExecIsNotTheNodes(t *testing.T) {
	path, err := filepath.Abs("../../bin/debian/usr/sbin/runc")
	check(t, err)
	n := nodetest.New(t, nodetest.Runtime("runc", path))
	n.ImportBusybox()
	before := modeOfNull(t)
	t.Cleanup(func() { check(t, os.Chmod(os.DevNull, before)) })
	for _, handler := range []string{"", "runc"} {
		pod := n.PodConfig("null" + handler)
		answer := nodetest.Call(t, n.Runtime.RunPodSandbox, &runtimeapi.RunPodSandboxRequest{Config: pod, RuntimeHandler: handler})
		p := &tenant{n, t, pod, answer.GetPodSandboxId()}
		id := p.run("c", func(c *runtimeapi.ContainerConfig) {
			c.Command = []string{"/bin/sh", "-c", "chmod 0600 /proc/self/fd/0; touch /tmp/done; exec sleep 1000000"}
		})
		code, output := run(t, n, id, "/bin/sh", "-c", "until [ -e /tmp/done ]; do sleep 0.1; done; chmod 0600 /proc/self/fd/0; cat; echo end")
		harness.Want(t, code == 0 && output == "end\n", "handler %q: %d, %q", handler, code, output)
		harness.Same(t, handler+": the mode of the node's /dev/null", modeOfNull(t), before)
	}
}

func modeOfNull(t *testing.T) os.FileMode {
	info, err := os.Stat(os.DevNull)
	check(t, err)
	return info.Mode().Perm()
}

// written is how many bytes of file a command of the container could write, of the many that it tries.
func written(t testing.TB, n *nodetest.Node, container, file string) int64 {
	const most = 128 // MiB, more than anything here may hold
	_, output := run(t, n, container, "/bin/sh", "-c", fmt.Sprintf("dd if=/dev/zero of=%s bs=65536 count=%d 2>/dev/null; wc -c <%s", file, most<<4, file))
	size, err := strconv.ParseInt(strings.TrimSpace(output), 10, 64)
	harness.Need(t, err == nil, "%s: %q", file, output)
	return size
}

// attack: containers: root in a container, privileged or not, fills /etc/hosts, /etc/hostname, /etc/resolv.conf, /dev/shm, /dev and /run of its pod, and creates files there without end
// held: the three files take 256 KiB together, /dev/shm its 64 MiB, and nothing of it is on the file system of the daemon's state; other pods continue; other containers of the pod start with the pod's HOSTNAME
// field: containerd and CRI-O keep the three files in directories of the node without a limit; HOSTNAME does not come from the file there either
func TestAContainerCannotFillTheNode(t *testing.T) {
	n := newNode(t)
	for _, privileged := range []bool{false, true} {
		t.Run(fmt.Sprintf("privileged=%t", privileged), func(t *testing.T) {
			p := newTenant(t, n, fmt.Sprintf("fill-%t", privileged), func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = privileged })
			id := p.run("c", func(c *runtimeapi.ContainerConfig) { c.Linux.SecurityContext.Privileged = privileged })
			before := kept(t, n.State)
			files := int64(0)
			for _, file := range []string{"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"} {
				files += written(t, n, id, file)
			}
			harness.Want(t, files >= 100<<10 && files <= 257<<10, "the files of the pod hold %d bytes", files)
			_, output := run(t, n, p.run("next"), "/bin/sh", "-c", "echo $HOSTNAME")
			harness.Want(t, output == p.pod.Hostname+"\n", "HOSTNAME is %q, want %q", output, p.pod.Hostname)
			for file, most := range harness.Sorted(map[string]int64{"/dev/shm/x": 64 << 20, "/dev/x": 64 << 20}) {
				size := written(t, n, id, file)
				harness.Want(t, size != 0 && size <= most, "%s holds %d bytes", file, size)
			}
			// A full file system takes no more files either, and inodes have an end.
			code, output := run(t, n, id, "/bin/sh", "-c", "rm /dev/shm/x; i=0; while [ $i -lt 100 ] && echo >/dev/shm/$i; do i=$((i+1)); done; for f in /etc/hosts /etc/hostname /etc/resolv.conf; do : >$f || exit 9; done")
			harness.Want(t, code == 0, "the files cannot be made small again: %d: %s", code, output)
			grown := kept(t, n.State) - before
			harness.Want(t, grown <= 64<<10, "the state holds %d bytes more", grown)
		})
	}
	n.RunPod(n.PodConfig("next")) // with hostname, hosts and resolv.conf of its own
}

// kept is what a directory holds of its file system, without what is mounted in it.
func kept(t testing.TB, directory string) (bytes int64) {
	var root unix.Stat_t
	check(t, unix.Stat(directory, &root))
	check(t, filepath.WalkDir(directory, func(path string, entry fs.DirEntry, err error) error {
		var stat unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &stat)
		}
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err == nil && stat.Dev != root.Dev && entry.IsDir():
			return fs.SkipDir
		case err == nil && stat.Dev == root.Dev:
			bytes += stat.Blocks * 512
		}
		return err
	}))
	return bytes
}

// attack: images: image calls name a runtime handler that the node lacks, or have annotations of a pod
// held: the handler is refused by its name, the annotations change nothing
//
// cri: Image.spec ImageSpec.annotations ImageSpec.runtime_handler
func TestRuntimeHandlerOfImageCalls(t *testing.T) {
	n, content, host := newRegistryNode(t)
	m := content.Image(ocispec.ImageConfig{}, registry.Layer(registry.File("a", 0o644, "x")))
	content.Manifest("plain:1", m.MediaType, m)
	unknown := &runtimeapi.ImageSpec{Image: host + "/plain:1", RuntimeHandler: "no-such-handler"}
	for _, err := range []error{
		nodetest.Err(t, n.Image.PullImage, &runtimeapi.PullImageRequest{Image: unknown}),
		nodetest.Err(t, n.Image.ImageStatus, &runtimeapi.ImageStatusRequest{Image: unknown}),
		nodetest.Err(t, n.Image.RemoveImage, &runtimeapi.RemoveImageRequest{Image: unknown}),
		nodetest.Err(t, n.Image.ListImages, &runtimeapi.ListImagesRequest{Filter: &runtimeapi.ImageFilter{Image: unknown}}),
	} {
		nodetest.WantCode(t, err, codes.InvalidArgument, "no-such-handler")
	}
	known := &runtimeapi.ImageSpec{Image: host + "/plain:1", RuntimeHandler: "runc", Annotations: map[string]string{"of.the/pod": "x"}}
	nodetest.Call(t, n.Image.PullImage, &runtimeapi.PullImageRequest{Image: known})
	spec := nodetest.Call(t, n.Image.ImageStatus, &runtimeapi.ImageStatusRequest{Image: known}).GetImage().GetSpec()
	harness.Want(t, spec.GetRuntimeHandler() == "" && len(spec.GetAnnotations()) == 0, "Image.spec: %v", spec)
	nodetest.Call(t, n.Image.RemoveImage, &runtimeapi.RemoveImageRequest{Image: known})
}

// attack: images: a local user of the node has the path of a setuid program and of a device node in a layer and in a volume of the image
// held: none can be reached; the volume has no device node
// field: containerd had CVE-2021-41103; its volumes still contain the device nodes
func TestNothingOfAnImageIsReachableOnTheNode(t *testing.T) {
	n, content, host := newRegistryNode(t)
	program := harness.Read(t, "/bin/busybox")
	m := content.Image(
		ocispec.ImageConfig{Env: []string{"PATH=/bin"}, Volumes: map[string]struct{}{"/data": {}}},
		registry.Layer(
			registry.Dir("bin", 0o755, 0), registry.File("bin/sleep", 0o755, string(program)), registry.File("bin/stat", 0o755, string(program)), registry.File("bin/suid", 0o4755, string(program)), registry.Device("mem", 0o666, 1, 1),
			registry.Dir("data", 0o777, 0), registry.File("data/suid", 0o4755, string(program)), registry.Device("data/mem", 0o666, 1, 1),
		))
	content.Manifest("suid:1", m.MediaType, m)
	_, err := pull(t, n, host+"/suid:1", nil)
	check(t, err)
	var found []string
	for name, options := range harness.Sorted(map[string][]nodetest.PodOption{"suid": nil, "suid-userns": {nodetest.UserNamespace}}) {
		id := newTenant(t, n, name, options...).run("c", func(c *runtimeapi.ContainerConfig) { c.Image.Image = host + "/suid:1" })
		code, output := run(t, n, id, "/bin/stat", "-c", "%u:%a", "/bin/suid", "/data")
		harness.Want(t, code == 0 && output == "0:4755\n0:777\n", "%s: the container's own view: %d, %s", name, code, output)
		found = append(found, filepath.Join(n.State, "containers", id, "config.json"))
		_, err := os.Lstat(found[len(found)-1])
		check(t, err) // else it would prove nothing
	}
	found = append(found, dangerous(t, n.Root, n.State)...)
	harness.Need(t, len(found) >= 2+2*3, "the attack is not in place: %q", found)
	for _, path := range found {
		harness.Want(t, !strings.Contains(path, "container-volumes") || !strings.HasSuffix(path, "/mem"),
			"a device node was copied into a volume: %s", path)
	}
	harness.Same(t, "a local user reaches", asNobody(t, found), "")
	nodetest.Call(t, n.Image.RemoveImage, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: host + "/suid:1"}})
}

// dangerous finds setuid programs and device nodes. Whiteouts (device 0:0) are none.
func dangerous(t testing.TB, roots ...string) (paths []string) {
	for _, root := range roots {
		check(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			var stat unix.Stat_t
			if err == nil {
				err = unix.Lstat(path, &stat)
			}
			kind := stat.Mode & unix.S_IFMT
			if stat.Mode&unix.S_ISUID != 0 || (kind == unix.S_IFCHR || kind == unix.S_IFBLK) && stat.Rdev != 0 {
				paths = append(paths, path)
			}
			return harness.IgnoreMissing(err)
		}))
	}
	return paths
}

// asNobody returns which of the paths uid 65534 reaches.
func asNobody(t testing.TB, paths []string) string {
	command := exec.Command("/bin/sh", "-c", `while read -r path; do [ ! -e "$path" ] || echo "$path"; done`)
	command.Stdin = strings.NewReader(strings.Join(paths, "\n") + "\n")
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	output, err := command.CombinedOutput()
	check(t, err)
	return string(output)
}

// Each form of credentials that the CRI has opens the registry that asks for it, wrong ones open none, and
// those of another server are not shown.
//
// cri: AuthConfig.auth AuthConfig.identity_token AuthConfig.password AuthConfig.registry_token
// cri: AuthConfig.server_address AuthConfig.username PullImageRequest.auth PullImageResponse.image_ref
func TestCredentialsOfAPull(t *testing.T) {
	n, content, host := newRegistryNode(t)
	m := content.Image(ocispec.ImageConfig{}, registry.Layer(registry.File("a", 0o644, "x")))
	content.Manifest("password:1", m.MediaType, m)
	content.Manifest("token:1", m.MediaType, m)
	const password, token, access = "Basic dXNlcjpzM2NyZXQ=", "Bearer registry-token", "Bearer access-token" // user:s3cret
	shown := make(chan string, 100)
	content.Answer(func(w http.ResponseWriter, r *http.Request) (answered bool) {
		sent := r.Header.Get("Authorization")
		ofTokens := strings.HasPrefix(r.URL.Path, "/v2/token/")
		switch {
		case r.URL.Path == "/token":
			identity := r.PostFormValue("refresh_token")
			if shown <- "identity " + identity; identity == "identity-token" {
				_, _ = w.Write([]byte(`{"access_token":"access-token"}`))
				return true
			}
		case sent != "":
			if shown <- sent; ofTokens && (sent == token || sent == access) || !ofTokens && sent == password {
				return false
			}
		}
		if ofTokens {
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+host+`/token",service="registry"`)
		} else {
			w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
		}
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	type auth = runtimeapi.AuthConfig
	for name, test := range harness.Sorted(map[string]struct {
		image string
		auth  *auth
		opens bool
		shown string
	}{
		"none":                   {"password", nil, false, ""},
		"username and password":  {"password", &auth{Username: "user", Password: "s3cret"}, true, password},
		"a wrong password":       {"password", &auth{Username: "user", Password: "wrong"}, false, "Basic "},
		"auth that is no base64": {"password", &auth{Auth: "%%%s3cret"}, false, ""},
		"auth":                   {"password", &auth{Auth: base64.StdEncoding.EncodeToString([]byte("user:s3cret"))}, true, password},
		"this server's":          {"password", &auth{Username: "user", Password: "s3cret", ServerAddress: "http://" + host}, true, password},
		"another server's":       {"password", &auth{Username: "user", Password: "s3cret", ServerAddress: "another.example"}, false, ""},
		"registry token":         {"token", &auth{RegistryToken: "registry-token"}, true, token},
		"identity token":         {"token", &auth{IdentityToken: "identity-token"}, true, "identity identity-token, " + access},
		"a wrong identity token": {"token", &auth{IdentityToken: "wrong"}, false, "identity wrong"},
	}) {
		id, err := pull(t, n, host+"/"+test.image+":1", test.auth)
		opened := err == nil && id == m.Config.Digest.String()
		harness.Want(t, opened == test.opens && (err == nil || !strings.Contains(err.Error(), "s3cret")), "%s: image %q, error %v", name, id, err)
		var seen []string
		for len(shown) > 0 {
			seen = append(seen, <-shown)
		}
		if all := strings.Join(seen, ", "); (all == "") != (test.shown == "") || !strings.HasPrefix(all, test.shown) {
			t.Errorf("%s: the registry was shown %q, want %q", name, all, test.shown)
		}
		nodetest.Call(t, n.Image.RemoveImage, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: host + "/" + test.image + ":1"}})
	}
}
