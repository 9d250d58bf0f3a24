// Package critest runs critest, the validation suite of the CRI (sigs.k8s.io/cri-tools), against a daemon: make
// critest. The images that its specs pull are built here and served by a registry in this process, which stands in
// for registry.k8s.io, k8s.gcr.io and gcr.io by hosts.toml files; no other host is asked.
//
// All specs run. None may fail, and those that skip themselves have to be listed with their reason in skipped.txt.
// One constant of the suite is replaced when it is built (hack/critest/build): the digest of an image that only its
// owner can push.
package critest

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
	"github.com/minicri/minicri/test/nodetest"
)

func TestMain(m *testing.M) { os.Exit(nodetest.Main(m)) }

// patience is how long the whole suite may take.
const patience = 40 * time.Minute

// No spec fails, and each one that skips itself is in skipped.txt with its reason; what is in there does skip itself.
func TestCritest(t *testing.T) {
	certs := t.TempDir()
	n := nodetest.New(t, nodetest.PortMap(), nodetest.Flags("--certs-dir", certs))
	n.ImportBusybox() // what an image store has once and keeps is no leak of the specs
	r := registry.New()
	addImages(t, r)
	serve(t, n, r, certs)

	report := run(t, n)
	removeImages(t, n)
	counts := map[string]int{}
	var skipped []string
	for _, s := range report {
		counts[s.State]++
		switch {
		case s.State == "skipped":
			skipped = append(skipped, s.name())
		case s.State != "passed":
			t.Errorf("%s: %s: %s\n%s", s.State, s.name(), s.Failure.Message, s.Failure.Location)
		}
	}
	t.Logf("critest: %d passed, %d skipped of %d", counts["passed"], counts["skipped"], len(report))
	if os.Getenv("CRITEST_FOCUS") == "" {
		compareSkipped(t, skipped)
	}
}

// serve serves the registry in the node's network namespace, and makes the node ask it for the images of all hosts.
func serve(t *testing.T, n *nodetest.Node, r *registry.Registry, certs string) {
	listener := n.Listen("127.0.0.1:0")
	server := &http.Server{Handler: r, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	for _, host := range []string{"gcr.io", "k8s.gcr.io", "registry.k8s.io", strings.TrimSuffix(local, "/")} {
		dir := filepath.Join(certs, host)
		url := fmt.Sprintf("http://%s/v2/%s", listener.Addr(), host)
		text := fmt.Sprintf("server = %q\n[host.%q]\ncapabilities = ['pull', 'resolve']\noverride_path = true\n", url, url)
		harness.Check(t, errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(text), 0o644)))
	}
}

// spec is a part of ginkgo's report.
type spec struct {
	ContainerHierarchyTexts           []string
	LeafNodeType, LeafNodeText, State string
	Failure                           struct {
		Message  string
		Location json.RawMessage
	}
}

func (s spec) name() string {
	return strings.Join(append(slices.Clone(s.ContainerHierarchyTexts), s.LeafNodeText), " ")
}

// run runs the suite and returns its report. CRITEST_FOCUS is a pattern of the specs to run.
func run(t *testing.T, n *nodetest.Node) (specs []spec) {
	images := filepath.Join(n.Dir, "images.yaml")
	text := "defaultTestContainerImage: " + local + "busybox:1\nwebServerTestImage: " + local + "nginx:1\n"
	harness.Check(t, os.WriteFile(images, []byte(text), 0o644))
	report := filepath.Join(n.Dir, "report.json")
	ctx := harness.Limited(t)
	command := exec.CommandContext(ctx, "../../bin/critest/critest", "-config", filepath.Join(n.Dir, "none"),
		"-runtime-endpoint", "unix://"+n.Socket, "-image-endpoint", "unix://"+n.Socket, "-test-images-file", images,
		"-nri-socket", filepath.Join(n.Dir, "nri/nri.sock"), "-ginkgo.json-report", report, "-ginkgo.no-color",
		"-ginkgo.focus", os.Getenv("CRITEST_FOCUS"), "-test.timeout", patience.String())
	log, err := os.Create("../../bin/critest/log")
	harness.Check(t, err)
	defer log.Close()
	command.Stdout, command.Stderr = log, log
	n.RunInNetns(func() error {
		_ = command.Run() // the report says what failed
		return nil
	})
	data, err := os.ReadFile(report)
	harness.Need(t, err == nil, "critest wrote no report, its log is in bin/critest/log: %v", err)
	var suites []struct{ SpecReports []spec }
	harness.Check(t, json.Unmarshal(data, &suites))
	for _, suite := range suites {
		for _, s := range suite.SpecReports {
			// Specs that a focus or the suite's own filter (benchmarks) leaves out have no reason to skip.
			if s.LeafNodeType == "It" && (s.State != "skipped" || s.Failure.Message != "") {
				specs = append(specs, s)
			}
		}
	}
	harness.Need(t, len(specs) != 0, "critest ran no spec, its log is in bin/critest/log")
	return specs
}

// removeImages removes what the specs pulled.
func removeImages(t *testing.T, n *nodetest.Node) {
	list := nodetest.Call(t, n.Image.ListImages, &runtimeapi.ListImagesRequest{})
	for _, image := range list.GetImages() {
		_, err := n.Image.RemoveImage(t.Context(), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: image.GetId()}})
		harness.Want(t, err == nil, "%v", err)
	}
}

// compareSkipped compares with skipped.txt: a reason, then the specs that it is
// for, each with a hyphen. Where there is AppArmor none may be skipped.
func compareSkipped(t *testing.T, skipped []string) {
	t.Helper()
	listed := map[string]bool{}
	reason := ""
	for line := range strings.Lines(string(harness.Read(t, "skipped.txt"))) {
		line = strings.TrimSpace(line)
		name, isSpec := strings.CutPrefix(line, "- ")
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
		case !isSpec:
			reason = line
		case reason == "":
			t.Errorf("skipped.txt gives no reason for %s", name)
		default:
			listed[name] = true
		}
	}
	if enabled, _ := os.ReadFile("/sys/module/apparmor/parameters/enabled"); strings.HasPrefix(string(enabled), "Y") {
		clear(listed) // all want it
	}
	for _, name := range skipped {
		harness.Want(t, listed[name], "skipped, and not in skipped.txt: %s", name)
		delete(listed, name)
	}
	for name := range listed {
		t.Errorf("in skipped.txt, and not skipped: %s", name)
	}
}

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
	object := func(d ocispec.Descriptor) nodetest.Object {
		return nodetest.Object{"mediaType": d.MediaType, "digest": d.Digest, "size": d.Size}
	}
	var manifests []nodetest.Object
	for _, architecture := range []string{"amd64", "arm64"} {
		config, err := json.Marshal(nodetest.Object{
			"architecture": architecture, "os": "linux", "config": nodetest.Object{"Cmd": []string{"none"}},
			"rootfs": nodetest.Object{"type": "layers", "diff_ids": []digest.Digest{digest.FromBytes(layer)}},
		})
		harness.Check(t, err)
		manifest := object(r.Manifest(name, ocispec.MediaTypeImageManifest, nodetest.Object{
			"schemaVersion": 2, "mediaType": ocispec.MediaTypeImageManifest, "config": object(r.Blob(ocispec.MediaTypeImageConfig, config)),
			"layers": []nodetest.Object{object(r.Blob(ocispec.MediaTypeImageLayer, layer))},
		}))
		manifest["platform"] = nodetest.Object{"architecture": architecture, "os": "linux"}
		manifests = append(manifests, manifest)
	}
	index := nodetest.Object{"schemaVersion": 2, "mediaType": ocispec.MediaTypeImageIndex, "manifests": manifests}
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
