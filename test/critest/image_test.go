package critest

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// The media types of OCI images.
const (
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	indexType    = "application/vnd.oci.image.index.v1+json"
	configType   = "application/vnd.oci.image.config.v1+json"
	layerType    = "application/vnd.oci.image.layer.v1.tar"
)

// The hosts whose images critest pulls, and one for -test-images-file.
const (
	staging = "gcr.io/k8s-staging-cri-tools/"
	e2e     = "registry.k8s.io/e2e-test-images/"
	local   = "critest.example/"
)

type object = harness.Object

// addImages puts all images that the specs name into the registry.
func addImages(t *testing.T, r *registry) {
	t.Helper()
	busybox := tarOf(t, busyboxFiles(t))
	run := func(entry string, env ...string) object {
		return object{"Entrypoint": []string{entry}, "Env": append([]string{"PATH=/bin"}, env...)}
	}
	as := func(user string) object {
		return object{"Cmd": []string{"sh"}, "Env": []string{"PATH=/bin"}, "User": user}
	}
	shell := as("")
	server := tarOf(t, []file{
		{"bin/nginx", 0o755, replica(t), ""},
		{"bin/nginx: master process", 0, "", "nginx"},
		{"bin/httpd-foreground", 0o755, "", "nginx"},
		{"bin/nonewprivs", 0o4755, replica(t), ""},
	})
	note := func(text string) []byte { return tarOf(t, []file{{"note", 0o644, text, ""}}) }

	for _, name := range []string{e2e + "busybox:1.29-2", local + "busybox:1"} {
		r.add(name, r.image(shell, busybox))
	}
	for _, name := range []string{e2e + "nginx:1.14-2", local + "nginx:1"} {
		r.add(name, r.image(run("nginx: master process"), busybox, server))
	}
	r.add(staging+"hostnet-nginx-"+runtime.GOARCH+":latest", r.image(run("nginx: master process", "PORT=12003"), busybox, server))
	r.add(e2e+"httpd:2.4.39-4", r.image(run("httpd-foreground"), busybox, server))
	r.add(e2e+"nonewprivs:1.3", r.image(run("nonewprivs"), busybox, server))
	for name, user := range map[string]string{
		"test-image-user-uid": "1002", "test-image-user-username": "www-data", "test-image-user-uid-group": "1003:users",
		"test-image-user-username-group": "www-data:100", "test-image-predefined-group": "1000",
	} {
		r.add(staging+name+":latest", r.image(as(user), busybox))
	}
	for _, name := range []string{"test-image-latest:latest", "test-image-tag:test", "test-image-tag:all", "test-image-1:latest", "test-image-2:latest", "test-image-3:latest"} {
		r.add(staging+name, r.image(shell, busybox, note(name)))
	}
	same := r.image(shell, busybox, note("tags"))
	for _, tag := range []string{"1", "2", "3"} {
		r.add(staging+"test-image-tags:"+tag, same)
	}
	pause := r.image(run("/pause"), tarOf(t, []file{{"pause", 0o755, replica(t), ""}}))
	r.add("registry.k8s.io/pause:3.9", pause)
	r.add("k8s.gcr.io/pause:3.9", pause)
	// What a spec pulls by its digest is the same on every machine: an index for all
	// architectures, and no program in it.
	want := strings.TrimSpace(readFile(t, "digest.txt"))
	digest := r.index(object{"Cmd": []string{"none"}}, []string{"amd64", "arm64"}, note("digest"))
	if digest != want {
		t.Fatalf("the image that is pulled by digest has %s: write it into digest.txt, and build critest again", digest)
	}
	r.add(staging+"test-image-digest:latest", digest)
}

// file is a file of a layer, or with a target a link: hard if the target is
// absolute, as the mask of one path must not reach the others.
type file struct {
	name    string
	mode    int64
	content string
	target  string
}

func tarOf(t *testing.T, files []file) []byte {
	t.Helper()
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	for _, f := range files {
		header := &tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: f.mode, Size: int64(len(f.content))}
		switch {
		case strings.HasPrefix(f.target, "/"):
			header.Typeflag, header.Linkname = tar.TypeLink, f.target[1:]
		case f.target != "":
			header.Typeflag, header.Linkname = tar.TypeSymlink, f.target
		case strings.HasSuffix(f.name, "/"):
			header.Typeflag = tar.TypeDir
		}
		harness.Check(t, w.WriteHeader(header))
		_, err := w.Write([]byte(f.content))
		harness.Check(t, err)
	}
	harness.Check(t, w.Close())
	return buffer.Bytes()
}

// busyboxFiles are busybox with all its commands, and the users that the specs
// name.
func busyboxFiles(t *testing.T) []file {
	t.Helper()
	const program = "/bin/busybox" // Debian's busybox-static
	commands, err := exec.Command(program, "--list").Output()
	harness.Check(t, err)
	files := []file{
		{"bin/", 0o755, "", ""},
		{"dev/", 0o755, "", ""},
		{"etc/", 0o755, "", ""},
		{"proc/", 0o755, "", ""},
		{"sys/", 0o755, "", ""},
		{"tmp/", 0o1777, "", ""},
		{"var/", 0o755, "", ""},
		{"var/run/", 0o777, "", ""},
		{"root/", 0o700, "", ""},
		{"bin/busybox", 0o755, readFile(t, program), ""},
		{"etc/passwd", 0o644, "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33::/var:/bin/false\nnobody:x:65534:65534::/:/bin/false\ndefault-user:x:1000:1000::/:/bin/sh\n", ""},
		{"etc/group", 0o644, "root:x:0:\nwww-data:x:33:\nusers:x:100:\nnogroup:x:65534:\ndefault-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n", ""},
	}
	// Debian's busybox does not have these.
	files = append(files, file{"bin/pgrep", 0o755, replica(t), ""}, file{"bin/ipcs", 0o755, "", "/bin/pgrep"})
	files = append(files, file{"bin/sh", 0o755, shellWithoutLs(t, readFile(t, program)), ""})
	for _, command := range strings.Fields(string(commands)) {
		if command != "busybox" && command != "sh" {
			files = append(files, file{"bin/" + command, 0o755, "", "/bin/busybox"})
		}
	}
	return files
}

// shellWithoutLs is a busybox whose shell does not have ls in itself: Debian's
// prefers its own commands to those in the file system, and a spec masks /bin/ls.
// The name is replaced by one that sorts the same.
func shellWithoutLs(t *testing.T, busybox string) string {
	t.Helper()
	const names = "\x00ls\x00lsmod\x00"
	if strings.Count(busybox, names) != 1 {
		t.Fatalf("%q is in busybox %d times, not once: this test does not know its table of commands any more", names, strings.Count(busybox, names))
	}
	return strings.Replace(busybox, names, "\x00lr\x00lsmod\x00", 1)
}

// replica is the program of test/critest/replica, which make critest builds.
func replica(t *testing.T) string {
	t.Helper()
	return readFile(t, "../../bin/critest/replica")
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	harness.Check(t, err)
	return string(data)
}

func digestOf(data []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(data)) }

func encode(value any) []byte {
	data, err := json.Marshal(value)
	if err != nil {
		panic(err) // of maps, texts and numbers it cannot fail
	}
	return data
}
