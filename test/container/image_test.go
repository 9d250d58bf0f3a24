package container

import (
	"archive/tar"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
	"github.com/minicri/minicri/test/nodetest"
)

// builders is a registry of the node, with a layer that all images have.
type builders struct {
	*registry.Registry
	host string
	base []byte
}

func newBuilders(t *testing.T, n *nodetest.Node) builders {
	r, listener := registry.New(), n.Listen("127.0.0.1:0")
	server := &http.Server{Handler: r}
	go func() { _ = server.Serve(listener) }() // until Close
	t.Cleanup(func() { _ = server.Close() })
	busybox, err := os.ReadFile("/bin/busybox")
	check(t, err)
	all := []registry.Entry{registry.Dir("bin", 0o755, 0), registry.File("bin/busybox", 0o755, string(busybox))}
	for _, applet := range []string{"cat", "echo", "env", "id", "ls", "printf", "pwd", "readlink", "sh", "stat"} {
		all = append(all, symlink("bin/"+applet, "busybox"))
	}
	return builders{r, listener.Addr().String(), registry.Layer(all...)}
}

func symlink(name, target string) registry.Entry {
	return registry.Entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}}
}

func hardLink(name, target string) registry.Entry {
	return registry.Entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target, Mode: 0o755}}
}

// indexer makes an index of a repository's image.
type indexer = func(repository string, image ocispec.Descriptor) ocispec.Index

// push stores an image whose configuration is a text, and names it. index, if any, replaces the manifest of that name.
func (b builders) push(name, config string, layers [][]byte, index indexer) string {
	manifest, diffs := b.Image(ocispec.ImageConfig{}), []digest.Digest{}
	manifest.Layers = []ocispec.Descriptor{}
	for _, layer := range layers {
		manifest.Layers = append(manifest.Layers, b.Blob(ocispec.MediaTypeImageLayer, layer))
		diffs = append(diffs, digest.FromBytes(layer))
	}
	ids, _ := json.Marshal(diffs)
	manifest.Config = b.Blob(ocispec.MediaTypeImageConfig, fmt.Appendf(nil,
		`{"os": "linux", "architecture": %q, "config": %s, "rootfs": {"type": "layers", "diff_ids": %s}}`,
		runtime.GOARCH, config, ids))
	pushed := b.Manifest(name+":1", manifest.MediaType, manifest)
	if index != nil {
		list := index(name, pushed)
		b.Manifest(name+":1", list.MediaType, list)
	}
	return b.host + "/" + name + ":1"
}

// with are entries of a layer, an option of the container, and what replaces the manifest.
type with []any

// TestImagesOfBuilders runs images in the forms of builders. containerd has the same results for the same images.
func TestImagesOfBuilders(t *testing.T) {
	p := newPod(t)
	b := newBuilders(t, p.Node)
	words := func(args ...string) option { return func(c *runtimeapi.ContainerConfig) { c.Args = args } }
	readonly := func(c *runtimeapi.ContainerConfig) { c.Linux.SecurityContext.ReadonlyRootfs = true }
	attested := func(_ string, image ocispec.Descriptor) ocispec.Index { // buildkit writes provenance so
		attestation := image
		attestation.Platform = &ocispec.Platform{OS: "unknown", Architecture: "unknown"}
		attestation.Annotations = map[string]string{"vnd.docker.reference.type": "attestation-manifest"}
		image.Platform = &ocispec.Platform{OS: "linux", Architecture: runtime.GOARCH}
		all := []ocispec.Descriptor{attestation, image}
		return ocispec.Index{MediaType: ocispec.MediaTypeImageIndex, Manifests: all}
	}
	nested := func(name string, image ocispec.Descriptor) ocispec.Index {
		inner := b.Manifest(name+":inner", ocispec.MediaTypeImageIndex, attested(name, image))
		return ocispec.Index{MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{inner}}
	}
	dir, file := registry.Dir, registry.File
	passwd := file("etc/passwd", 0o644,
		"root:x:0:0::/root:\n# users\n\nweb:x:1000:1000::/home/web:\nnum:x:77:78::/n:\n")
	group := file("etc/group", 0o644, "root:x:0:\nweb:x:1000:\nextra:x:2000:web,num\nmore:x:2001:web\n")
	hidden := file("etc/real", 0, "web:x:1000:1::/w:")
	launcher := file("cnb/lifecycle/launcher", 0o755, "#!/bin/sh\necho \"${0##*/} $(id -u) $(pwd) $*\"\n")
	const who = `"Entrypoint": ["/bin/sh", "-c", "echo $(id -u):$(id -g) $(id -G) $HOME"]}`
	const where = `"Entrypoint": ["/bin/sh", "-c", "pwd; stat -c '%a %u' ."]}`
	const env = `{"Cmd": ["/bin/env"], "Env": `
	const path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOSTNAME=web "
	for i, test := range []struct {
		name, config string
		want         string // the output, or after "!" words of the error
		with         with
	}{
		{"an empty entry point", `{"Entrypoint": [""], "Cmd": ["/bin/echo", "a"]}`, "a", nil},
		{"an empty one, arguments", `{"Entrypoint": [""], "Cmd": ["x"]}`, "b", with{words("/bin/echo", "b")}},
		{"no entry point", `{"Entrypoint": [], "Cmd": ["/bin/echo", "a"]}`, "a", nil},
		{"a null entry point", `{"Entrypoint": null, "Cmd": ["/bin/echo", "a"]}`, "a", nil},
		{"null fields", `{"Entrypoint": ["/bin/echo", "a"], "Cmd": null, "Env": null, "Labels": null}`, "a", nil},
		{"an empty argument", `{"Entrypoint": ["/bin/printf", "<%s>"], "Cmd": ["", "x"]}`, "<><x>", nil},
		{"arguments replace the command", `{"Entrypoint": ["/bin/echo"], "Cmd": ["a"]}`, "b", with{words("b")}},
		{"a command replaces both", `{"Entrypoint": ["/x"], "Cmd": ["a"]}`, "c", with{command("/bin/echo", "c")}},
		{"by PATH of the image", `{"Entrypoint": ["echo", "a"], "Env": ["PATH=/bin"]}`, "a", nil},
		{"in the working directory", `{"Entrypoint": ["./echo", "a"], "WorkingDir": "/bin"}`, "a", nil},
		{"by a link", `{"Cmd": ["/app/echo", "a"]}`, "a", with{symlink("app", "/bin")}},
		{"two empty words", `{"Entrypoint": ["", ""]}`, "!executable file not found", nil},
		{"a command with a space", `{"Cmd": ["/bin/echo a"]}`, "!no such file or directory", nil},
		{"nothing to run", `null`, "!no command specified", nil},
		{"an empty word to run", `{"Entrypoint": [""]}`, "!no command specified", nil},

		{
			"variables", env + `["A=1", "A", "NONE", "", "=x", "C=", "D=a=b", "E=1", "E=2", "HOME=/h"]}`,
			path + "A=1 C= D=a=b E=2 HOME=/h", nil,
		},
		{"variables that the image removes", env + `["PATH", "HOSTNAME", "HOME=/h"]}`, "HOME=/h", nil},
		{"no variables", env + `null}`, path + "HOME=/", nil},

		{"no user", `{` + who, "0:0 0 /root", with{passwd, group}},
		{"a name", `{"User": "web", ` + who, "1000:1000 1000 2000 2001 /home/web", with{passwd, group}},
		{"a number", `{"User": "1000", ` + who, "1000:1000 1000 2000 2001 /home/web", with{passwd, group}},
		{"a name and a group", `{"User": "web:extra", ` + who, "1000:2000 2000 2001 /home/web", with{passwd, group}},
		{"numbers", `{"User": "9999:8888", ` + who, "9999:8888 8888 /", with{passwd, group}},
		{"a number of nobody", `{"User": "9999", ` + who, "9999:0 0 /", with{passwd, group}},
		{"a group alone", `{"User": ":extra", ` + who, "0:2000 2000 /root", with{passwd, group}},
		{"the pod's user", `{"User": "web:extra", ` + who, "77:78 78 2000 /n", with{passwd, group, asUser(77)}},
		{"an unknown name", `{"User": "none", ` + who, `!user "none" of the image`, with{passwd, group}},
		{"an unknown group", `{"User": "web:none", ` + who, `!user "web:none" of the image`, with{passwd, group}},
		{"no passwd, a number", `{"User": "1000:1000", ` + who, "1000:1000 1000 /", nil},
		{"no passwd, root", `{"User": "root", ` + who, `!user "root" of the image`, nil},
		{
			"passwd behind a link", `{"User": "web", ` + who, "1000:1 1 /w",
			with{symlink("etc/passwd", "../../../etc/real"), hidden},
		},

		{"no working directory", `{` + where, "/ 755 0", nil},
		{"one that is made", `{"WorkingDir": "/new/deep", "User": "1000", ` + where, "/new/deep 755 0", nil},
		{
			"one behind a link", `{"WorkingDir": "/link", ` + where, "/t 1777 0",
			with{dir("t", 0o1777, 0), symlink("link", "/t")},
		},
		{"one with dots", `{"WorkingDir": "/bin/../bin/", ` + where, "/bin 755 0", nil},
		{
			"one of the user", `{"WorkingDir": "/o", "User": "1000", ` + where, "/o 700 1000",
			with{dir("o", 0o700, 1000)},
		},
		{"a file as one", `{"WorkingDir": "/bin/busybox", ` + where, "!check the working directory", nil},

		{
			"ko and apko: no directories", `{"Entrypoint": ["/ko-app/busybox", "echo", "a"], "User": "65532"}`, "a",
			with{hardLink("ko-app/busybox", "bin/busybox")},
		},
		{
			"buildpacks: the launcher behind a link",
			`{"Entrypoint": ["/cnb/process/echo"], "User": "1000:1001", "WorkingDir": "/workspace"}`,
			"echo 1000 /workspace w",
			with{symlink("cnb/process/echo", "/cnb/lifecycle/launcher"), launcher, words("w")},
		},
		{
			"nix: a read-only store", `{"Entrypoint": ["/busybox"], "Cmd": ["echo", "a"]}`, "a",
			with{
				dir("nix/store/x", 0o555, 0), hardLink("nix/store/x/busybox", "bin/busybox"),
				symlink("busybox", "/nix/store/x/busybox"),
			},
		},
		{
			"bazel: names with a dot", `{"Entrypoint": ["/opt/busybox"], "Cmd": ["echo", "a"]}`, "a",
			with{dir("./", 0o755, 0), dir("./opt/", 0o755, 0), hardLink("./opt/busybox", "./bin/busybox")},
		},
		{
			"kaniko: a whiteout beside its file", `{"Cmd": ["/bin/ls", "/d"]}`, "new",
			with{dir("/", 0o755, 0), dir("d", 0o755, 0), file("d/new", 0o644, "x"), file(".wh.d", 0, "")},
		},
		{
			"jib: volumes, labels and ports",
			`{"Cmd": ["/bin/cat", "/data/x"], "Volumes": {"/data": {}, "/data/": null}, "Labels": {"": ""},
			"ExposedPorts": {"80": null}, "OnBuild": ["x"], "Healthcheck": {"Test": ["NONE"]}}`,
			"in it",
			with{dir("data", 0o750, 5), file("data/x", 0o600, "in it")},
		},
		{
			"umoci: a mount point behind a link", `{"Cmd": ["/bin/readlink", "/etc/hosts"]}`, "/run/hosts",
			with{symlink("etc/hosts", "/run/hosts")},
		},
		{
			"podman: a read-only root", `{"Cmd": ["/bin/sh", "-c", "ls -d /proc /dev; echo x >/x || echo no"]}`,
			"/dev /proc no",
			with{readonly},
		},
		{"buildkit: attestations", `{"Cmd": ["/bin/echo", "a"]}`, "a", with{attested}},
		{"an index in an index", `{"Cmd": ["/bin/echo", "a"]}`, "a", with{nested}},
	} {
		layers, entries := [][]byte{b.base}, []registry.Entry{}
		config := shell(fmt.Sprintf("c%d", i), "", func(c *runtimeapi.ContainerConfig) { c.Command = nil })
		var index indexer
		for _, one := range test.with {
			switch one := one.(type) {
			case registry.Entry:
				entries = append(entries, one)
			case indexer:
				index = one
			case option:
				one(config)
			case func(*runtimeapi.ContainerConfig):
				one(config)
			}
		}
		if len(entries) > 0 {
			layers = append(layers, registry.Layer(entries...))
		}
		name := b.push(fmt.Sprintf("case%d", i), test.config, layers, index)
		image := &runtimeapi.ImageSpec{Image: name}
		pulled := nodetest.Call(t, p.Image.PullImage, &runtimeapi.PullImageRequest{Image: image})
		config.Image.Image = pulled.ImageRef
		p.checkRun(test.name, config, test.want)
		nodetest.Call(t, p.Image.RemoveImage, &runtimeapi.RemoveImageRequest{Image: image})
	}
	// The kernel may refuse a memory limit below the usage. With cgroup v2 it kills the container instead.
	id := p.run("full", "x=$(yes | head -c 8000000); echo ready; sleep 1000")
	p.awaitLine(id, "ready")
	if err := p.update(id, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 4096}); err != nil {
		wantCode(t, err, codes.FailedPrecondition)
	}
}

// checkRun wants the words of a container's output or, after "!", words of its error.
func (p *pod) checkRun(name string, config *runtimeapi.ContainerConfig, want string) {
	id, err := p.tryCreate(config)
	if err == nil {
		err = p.start(id)
	}
	if words, fails := strings.CutPrefix(want, "!"); fails {
		harness.Want(p.t, err != nil && strings.Contains(err.Error(), words), "%s: %v, want %q", name, err, words)
		return
	}
	harness.Need(p.t, err == nil, "%s: %v", name, err)
	end := p.awaitExit(id)
	stdout, stderr := p.logs(id)
	got := strings.Join(strings.Fields(stdout), " ")
	harness.Want(p.t, got == want && end.ExitCode == 0, "%s: %d, %q %q, want %q", name, end.ExitCode, got, stderr, want)
}
