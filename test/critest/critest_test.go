package critest

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// patience is how long the whole suite may take.
const patience = 40 * time.Minute

// No spec fails, and each one that skips itself is in skipped.txt with its
// reason; what is in there does skip itself.
func TestCritest(t *testing.T) {
	certs := t.TempDir()
	n := harness.NewNode(t, harness.PortMap(), harness.Flags("--certs-dir", certs))
	n.ImportBusybox() // what an image store has once and keeps is no leak of the specs
	r := newRegistry()
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
	if len(r.asked) > 0 {
		t.Logf("the registry was asked for what it does not have: %q", r.asked)
	}
	if os.Getenv("CRITEST_FOCUS") == "" {
		compareSkipped(t, skipped)
	}
}

// serve serves the registry in the node's network namespace, and makes the node
// ask it for the images of all hosts.
func serve(t *testing.T, n *harness.Node, r *registry, certs string) {
	t.Helper()
	var listener net.Listener
	n.RunInNetns(func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	server := &http.Server{Handler: r, ReadHeaderTimeout: time.Minute}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(listener)
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
	for _, host := range []string{"gcr.io", "k8s.gcr.io", "registry.k8s.io", strings.TrimSuffix(local, "/")} {
		dir := filepath.Join(certs, host)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		url := fmt.Sprintf("http://%s/%s/v2", listener.Addr(), host)
		text := fmt.Sprintf("server = %q\n[host.%q]\ncapabilities = ['pull', 'resolve']\noverride_path = true\n", url, url)
		if err := os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// spec is a part of ginkgo's report.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeType            string
	LeafNodeText            string
	State                   string
	Failure                 struct {
		Message  string
		Location json.RawMessage
	}
}

func (s spec) name() string {
	return strings.Join(append(slices.Clone(s.ContainerHierarchyTexts), s.LeafNodeText), " ")
}

// run runs the suite and returns its report. CRITEST_FOCUS is a pattern of the
// specs to run.
func run(t *testing.T, n *harness.Node) (specs []spec) {
	t.Helper()
	images := filepath.Join(n.Dir, "images.yaml")
	text := "defaultTestContainerImage: " + local + "busybox:1\nwebServerTestImage: " + local + "nginx:1\n"
	if err := os.WriteFile(images, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	report := filepath.Join(n.Dir, "report.json")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	command := exec.CommandContext(ctx, "../../bin/critest/critest", "-config", filepath.Join(n.Dir, "none"),
		"-runtime-endpoint", "unix://"+n.Socket, "-image-endpoint", "unix://"+n.Socket, "-test-images-file", images,
		"-ginkgo.json-report", report, "-ginkgo.no-color", "-ginkgo.focus", os.Getenv("CRITEST_FOCUS"), "-test.timeout", patience.String())
	log, err := os.Create("../../bin/critest/log")
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	command.Stdout, command.Stderr = log, log
	n.RunInNetns(func() error {
		_ = command.Run() // the report says what failed
		return nil
	})
	data, err := os.ReadFile(report)
	if err != nil {
		t.Fatalf("critest wrote no report, its log is in bin/critest/log: %v", err)
	}
	var suites []struct{ SpecReports []spec }
	if err := json.Unmarshal(data, &suites); err != nil {
		t.Fatal(err)
	}
	for _, suite := range suites {
		for _, s := range suite.SpecReports {
			// Specs that a focus or the suite's own filter (benchmarks) leaves out have no reason to skip.
			if s.LeafNodeType == "It" && (s.State != "skipped" || s.Failure.Message != "") {
				specs = append(specs, s)
			}
		}
	}
	if len(specs) == 0 {
		t.Fatal("critest ran no spec, its log is in bin/critest/log")
	}
	return specs
}

// removeImages removes what the specs pulled.
func removeImages(t *testing.T, n *harness.Node) {
	t.Helper()
	list, err := n.Image.ListImages(t.Context(), &runtimeapi.ListImagesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, image := range list.GetImages() {
		if _, err := n.Image.RemoveImage(t.Context(), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: image.GetId()}}); err != nil {
			t.Error(err)
		}
	}
}

// compareSkipped compares with skipped.txt: a reason, then the specs that it is
// for, each with a hyphen. Where there is AppArmor none may be skipped.
func compareSkipped(t *testing.T, skipped []string) {
	t.Helper()
	listed := map[string]bool{}
	reason := ""
	for line := range strings.Lines(readFile(t, "skipped.txt")) {
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
		if !listed[name] {
			t.Errorf("skipped, and not in skipped.txt: %s", name)
		}
		delete(listed, name)
	}
	for name := range listed {
		t.Errorf("in skipped.txt, and not skipped: %s", name)
	}
}
