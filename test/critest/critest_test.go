// Package critest runs critest, the validation suite of the CRI (sigs.k8s.io/cri-tools), against a daemon: make
// critest. The images that its specs pull are built here and served by a registry in this process, which stands in
// for registry.k8s.io, k8s.gcr.io and gcr.io by hosts.toml files; no other host is asked.
//
// All specs run. None may fail, and those that skip themselves have to be listed with their reason in skipped.txt.
// One constant of the suite is replaced when it is built (hack/critest/build): the digest of an image that only its
// owner can push.
package critest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	"github.com/minicri/minicri/test/hostile/registry"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// patience is how long the whole suite may take.
const patience = 40 * time.Minute

// No spec fails, and each one that skips itself is in skipped.txt with its reason; what is in there does skip itself.
func TestCritest(t *testing.T) {
	certs := t.TempDir()
	n := harness.NewNode(t, harness.PortMap(), harness.Flags("--certs-dir", certs))
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
func serve(t *testing.T, n *harness.Node, r *registry.Registry, certs string) {
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
func run(t *testing.T, n *harness.Node) (specs []spec) {
	images := filepath.Join(n.Dir, "images.yaml")
	text := "defaultTestContainerImage: " + local + "busybox:1\nwebServerTestImage: " + local + "nginx:1\n"
	harness.Check(t, os.WriteFile(images, []byte(text), 0o644))
	report := filepath.Join(n.Dir, "report.json")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	command := exec.CommandContext(ctx, "../../bin/critest/critest", "-config", filepath.Join(n.Dir, "none"),
		"-runtime-endpoint", "unix://"+n.Socket, "-image-endpoint", "unix://"+n.Socket, "-test-images-file", images,
		"-ginkgo.json-report", report, "-ginkgo.no-color", "-ginkgo.focus", os.Getenv("CRITEST_FOCUS"), "-test.timeout", patience.String())
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
func removeImages(t *testing.T, n *harness.Node) {
	list, err := n.Image.ListImages(t.Context(), &runtimeapi.ListImagesRequest{})
	harness.Check(t, err)
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
