package critest

import (
	"archive/tar"
	"encoding/json"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
)

// The hosts whose images critest pulls, and one for -test-images-file.
const (
	staging = "gcr.io/k8s-staging-cri-tools/"
	e2e     = "registry.k8s.io/e2e-test-images/"
	local   = "critest.example/"
)

// addImages puts all images that the specs name into the registry.
func addImages(t *testing.T, r *registry.Registry) {
	t.Helper()
	busybox := registry.Layer(busyboxFiles(t)...)
	run := func(entry string, env ...string) ocispec.ImageConfig {
		return ocispec.ImageConfig{Entrypoint: []string{entry}, Env: append([]string{"PATH=/bin"}, env...)}
	}
	as := func(user string) ocispec.ImageConfig {
		return ocispec.ImageConfig{Cmd: []string{"sh"}, Env: []string{"PATH=/bin"}, User: user}
	}
	shell := as("")
	server := registry.Layer(
		registry.File("bin/nginx", 0o755, replica(t)), link("bin/nginx: master process", "nginx"),
		link("bin/httpd-foreground", "nginx"), registry.File("bin/nonewprivs", 0o4755, replica(t)),
	)
	note := func(text string) []byte { return registry.Layer(registry.File("note", 0o644, text)) }
	add := func(name string, config ocispec.ImageConfig, layers ...[]byte) {
		m := r.Image(config, layers...)
		r.Manifest(name, m.MediaType, m)
	}

	for _, name := range []string{e2e + "busybox:1.29-2", local + "busybox:1"} {
		add(name, shell, busybox)
	}
	for _, name := range []string{e2e + "nginx:1.14-2", local + "nginx:1"} {
		add(name, run("nginx: master process"), busybox, server)
	}
	add(staging+"hostnet-nginx-"+runtime.GOARCH+":latest", run("nginx: master process", "PORT=12003"), busybox, server)
	add(e2e+"httpd:2.4.39-4", run("httpd-foreground"), busybox, server)
	add(e2e+"nonewprivs:1.3", run("nonewprivs"), busybox, server)
	for name, user := range map[string]string{
		"test-image-user-uid": "1002", "test-image-user-username": "www-data", "test-image-user-uid-group": "1003:users",
		"test-image-user-username-group": "www-data:100", "test-image-predefined-group": "1000",
	} {
		add(staging+name+":latest", as(user), busybox)
	}
	for _, name := range []string{"test-image-latest:latest", "test-image-tag:test", "test-image-tag:all", "test-image-1:latest", "test-image-2:latest", "test-image-3:latest"} {
		add(staging+name, shell, busybox, note(name))
	}
	for _, tag := range []string{"1", "2", "3"} {
		add(staging+"test-image-tags:"+tag, shell, busybox, note("tags"))
	}
	for _, host := range []string{"registry.k8s.io", "k8s.gcr.io"} {
		add(host+"/pause:3.9", run("/pause"), registry.Layer(registry.File("pause", 0o755, replica(t))))
	}
	if digest := addIndex(t, r, staging+"test-image-digest:latest", note("digest")); digest.String() != strings.TrimSpace(string(harness.Read(t, "digest.txt"))) {
		t.Fatalf("the image that is pulled by digest has %s: write it into digest.txt, and build critest again", digest)
	}
}

// addIndex adds what a spec pulls by its digest, the same on every machine: an index for all
// architectures, and no program in it.
func addIndex(t *testing.T, r *registry.Registry, name string, layer []byte) digest.Digest {
	object := func(d ocispec.Descriptor) harness.Object {
		return harness.Object{"mediaType": d.MediaType, "digest": d.Digest, "size": d.Size}
	}
	var manifests []harness.Object
	for _, architecture := range []string{"amd64", "arm64"} {
		config, err := json.Marshal(harness.Object{
			"architecture": architecture, "os": "linux", "config": harness.Object{"Cmd": []string{"none"}},
			"rootfs": harness.Object{"type": "layers", "diff_ids": []digest.Digest{digest.FromBytes(layer)}},
		})
		harness.Check(t, err)
		manifest := object(r.Manifest(name, ocispec.MediaTypeImageManifest, harness.Object{
			"schemaVersion": 2, "mediaType": ocispec.MediaTypeImageManifest, "config": object(r.Blob(ocispec.MediaTypeImageConfig, config)),
			"layers": []harness.Object{object(r.Blob(ocispec.MediaTypeImageLayer, layer))},
		}))
		manifest["platform"] = harness.Object{"architecture": architecture, "os": "linux"}
		manifests = append(manifests, manifest)
	}
	index := harness.Object{"schemaVersion": 2, "mediaType": ocispec.MediaTypeImageIndex, "manifests": manifests}
	return r.Manifest(name, ocispec.MediaTypeImageIndex, index).Digest
}

// link is a symbolic link, or a hard one if its target is absolute, as the mask of one path must not reach the others.
func link(name, target string) registry.Entry {
	header := tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o755}
	if path, absolute := strings.CutPrefix(target, "/"); absolute {
		header.Typeflag, header.Linkname = tar.TypeLink, path
	}
	return registry.Entry{Header: header}
}

// busyboxFiles are busybox with all its commands, and the users that the specs name.
func busyboxFiles(t *testing.T) []registry.Entry {
	const program = "/bin/busybox" // Debian's busybox-static
	commands, err := exec.Command(program, "--list").Output()
	harness.Check(t, err)
	var files []registry.Entry
	for name, mode := range map[string]int64{"bin": 0o755, "dev": 0o755, "etc": 0o755, "proc": 0o755, "sys": 0o755, "tmp": 0o1777, "var": 0o755, "root": 0o700} {
		files = append(files, registry.Dir(name+"/", mode, 0))
	}
	const passwd = "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33::/var:/bin/false\nnobody:x:65534:65534::/:/bin/false\ndefault-user:x:1000:1000::/:/bin/sh\n"
	const group = "root:x:0:\nwww-data:x:33:\nusers:x:100:\nnogroup:x:65534:\ndefault-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n"
	files = append(files, registry.Dir("var/run/", 0o777, 0), registry.File("bin/busybox", 0o755, string(harness.Read(t, program))),
		registry.File("etc/passwd", 0o644, passwd), registry.File("etc/group", 0o644, group),
		registry.File("bin/sh", 0o755, shellWithoutLs(t, string(harness.Read(t, program)))),
		registry.File("bin/pgrep", 0o755, replica(t)), link("bin/ipcs", "/bin/pgrep")) // Debian's busybox does not have these
	for _, command := range strings.Fields(string(commands)) {
		if command != "busybox" && command != "sh" {
			files = append(files, link("bin/"+command, "/bin/busybox"))
		}
	}
	return files
}

// shellWithoutLs is a busybox whose shell does not have ls in itself: Debian's prefers its own commands to those in
// the file system, and a spec masks /bin/ls. The name is replaced by one that sorts the same.
func shellWithoutLs(t *testing.T, busybox string) string {
	const names = "\x00ls\x00lsmod\x00"
	harness.Need(t, strings.Count(busybox, names) == 1,
		"%q is in busybox %d times, not once: this test does not know its table of commands any more", names, strings.Count(busybox, names))
	return strings.Replace(busybox, names, "\x00lr\x00lsmod\x00", 1)
}

// replica is the program of test/critest/replica, which make critest builds.
func replica(t *testing.T) string { return string(harness.Read(t, "../../bin/critest/replica")) }
