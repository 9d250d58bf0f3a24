package main

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/minicri/minicri/internal/doctor"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/timeline"
	"github.com/minicri/minicri/test/harness"
)

// A program that reads the list of a node without pods gets a list.
func TestNoTimelinesAreAnEmptyList(t *testing.T) {
	var output strings.Builder
	root := t.TempDir()
	_, err := node.Open(root, t.TempDir(), t.TempDir())
	must(t, err)
	must(t, command(t.Context(), []string{"timeline", "--json", "--root", root, "--state", t.TempDir()}, &output))
	harness.Want(t, output.String() == "[]\n", "%q; want []", output.String())
}

// The daemon leaves out of a message what its code says.
func TestErrorsOfImagesSayTheirKind(t *testing.T) {
	for _, c := range []struct {
		code       codes.Code
		text, want string
	}{
		{codes.NotFound, `image "none"`, `image "none": not found`},
		{codes.NotFound, `image "none": not found`, `image "none": not found`},
		{codes.InvalidArgument, "invalid reference", "invalid reference"},
	} {
		err := withoutCode(status.Error(c.code, c.text))
		harness.Want(t, err.Error() == c.want, "%v %q: %q, want %q", c.code, c.text, err, c.want)
	}
	harness.Want(t, withoutCode(nil) == nil, "no error became one")
}

// An error's text makes no finding of its own.
func TestFindingsAreOneLineEach(t *testing.T) {
	var output strings.Builder
	forged := "a\n✓ b  all is well"
	must(t, printFindings(&output, []doctor.Finding{{Subject: forged, Grade: doctor.Problem, Message: forged, Advice: forged}}, problemsOnly))
	lines := strings.Split(strings.TrimSpace(output.String()), "\n")
	harness.Want(t, len(lines) == 2 && !strings.HasPrefix(lines[1], "✓"), "%q", lines)
}

// Problems come first, then warnings; good findings are a number, unless they are asked for.
func TestOrderOfFindings(t *testing.T) {
	findings := []doctor.Finding{
		{Subject: "g", Grade: doctor.Good, Message: "fine"},
		{Subject: "w", Grade: doctor.Warning, Message: "odd", Advice: "look"},
		{Subject: "p", Grade: doctor.Problem, Message: "bad", Advice: "mend", IDs: []string{"id1"}},
	}
	for _, c := range []struct {
		name   string
		detail detail
		want   string
	}{
		{"quiet", problemsOnly, "✗ p  bad\n     → mend\n"},
		{"default", summary, "✗ p  bad\n     → mend\n! w  odd\n     → look\n1 problem, 1 warning, 1 good (--verbose lists them)\n"},
		{"verbose", everything, "✗ p  bad\n     → mend\n       id1\n! w  odd\n     → look\n✓ g  fine\n1 problem, 1 warning, 1 good\n"},
	} {
		var output strings.Builder
		must(t, printFindings(&output, findings, c.detail))
		harness.Same(t, c.name, output.String(), c.want)
	}
}

func TestYAML(t *testing.T) {
	var b strings.Builder
	glance := timeline.Glance{Pods: []timeline.Line{{ID: "1", Name: "a/b: #c", Addresses: []string{"10.0.0.1"}}}}
	must(t, writeYAML(&b, glance.Pods))
	want := "- addresses:\n    - 10.0.0.1\n  containers: 0\n  cpuNanoseconds: 0\n  id: \"1\"\n  memoryBytes: 0\n  name: 'a/b: #c'\n  receivedBytes: 0\n"
	harness.Want(t, strings.HasPrefix(b.String(), want), "%s\nwant\n%s", b.String(), want)
}

func TestPodsAreChosen(t *testing.T) {
	l := timeline.Line{ID: "0123abcd", Name: "shop/cart-1", State: timeline.Ready}
	for f, want := range map[[3]string]bool{ // a name, a namespace, a state
		{}: true, {"", "shop"}: true, {"", "sho"}: false, {"", "", "ready"}: true, {"", "", "not ready"}: false,
		{"cart"}: true, {"shop/ca"}: true, {"0123"}: true, {"shop/x"}: false, {"cart", "x"}: false,
	} {
		harness.Same(t, strings.Join(f[:], " "), asked(l, f[0], f[1], f[2]), want)
	}
	for _, words := range []string{"pods", "timeline", "status", "inspect web", "image ls"} {
		err := command(t.Context(), append(strings.Fields(words), "--socket", "/nowhere/s"), io.Discard)
		harness.WantError(t, err, "no daemon serves /nowhere/s")
	}
}

func TestBundleHasNoSecrets(t *testing.T) {
	var data bytes.Buffer
	b := &bundle{tar: tar.NewWriter(&data)}
	networks := t.TempDir()
	must(t, os.WriteFile(filepath.Join(networks, "10-net.conflist"), []byte(`{"name":"net","plugins":[{"type":"x","password":"S3CRET"}]}`), 0o600))
	must(t, os.WriteFile(filepath.Join(networks, "broken"), []byte(`token: S3CRET`), 0o600))
	b.add("config.json", func() (any, error) {
		return map[string]any{"DefaultEnv": []string{"A=S3CRET"}, "Socket": "/run/x"}, nil
	})
	b.add("log.txt", func() (any, error) { return "dial https://u:S3CRET@h/: Authorization: Bearer S3CRETS3CRET", nil })
	b.add("gone.json", func() (any, error) { return nil, errors.New("no daemon, token=S3CRET") })
	b.networks("networks", networks)
	must(t, errors.Join(b.err, b.tar.Close()))
	var names []string
	for archive := tar.NewReader(&data); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		content, err := io.ReadAll(archive)
		must(t, err)
		names = append(names, strings.TrimPrefix(header.Name, "minicri-debug/"))
		harness.Want(t, !bytes.Contains(content, []byte("S3CRET")), "%s: %s", header.Name, content)
	}
	harness.Same(t, "files", names, []string{"config.json", "log.txt", "gone.json.missing", "networks/10-net.conflist.json", "networks/broken.json"})
}

// Callers that have gone are lowered, whatever else libraries say is not.
func TestLibraryLog(t *testing.T) {
	var written bytes.Buffer
	handler := slog.NewTextHandler(&written, &slog.HandlerOptions{Level: slog.LevelDebug})
	logger := slog.New(libraryLog{handler}).With("library", "x")
	for want, say := range map[string]func(){
		"level=DEBUG":            func() { logger.Error(lateAnswer, "stream", 1) },
		"level=DEBUG msg=failed": func() { logger.Error("failed", "error", fmt.Errorf("call: %w", context.Canceled)) },
		"level=ERROR":            func() { logger.Error("failed", "error", errors.New("disk full")) },
		"level=WARN":             func() { logger.Warn("odd") },
	} {
		written.Reset()
		say()
		harness.Want(t, strings.Contains(written.String(), want), "%q has no %s", &written, want)
	}
}

// Each line has the priority of its record, for journalctl -p err; a line of JSON is one.
func TestPrioritiesAndForms(t *testing.T) {
	var written bytes.Buffer
	logger := slog.New(newHandler(&written, "text", slog.LevelDebug, true)).With("pod", "web")
	for want, say := range map[string]func(string, ...any){"<3>": logger.Error, "<4>": logger.Warn, "<6>": logger.Info, "<7>": logger.Debug} {
		written.Reset()
		say("x")
		harness.Want(t, strings.HasPrefix(written.String(), want+"time=") && strings.Contains(written.String(), "pod=web"),
			"%q does not begin with %s", &written, want)
	}
	written.Reset()
	slog.New(newHandler(&written, "json", nil, false)).Info("x", "pod", "web", "took", 1500*time.Millisecond)
	var line struct{ Msg, Pod, Took string }
	err := json.Unmarshal(written.Bytes(), &line)
	harness.Need(t, err == nil, "%s: %v", &written, err)
	harness.Want(t, line.Msg == "x", "%s: %v", &written, err)
	harness.Want(t, line.Pod == "web", "%s: %v", &written, err)
	harness.Want(t, line.Took == "1.5s", "%s: %v", &written, err)
}

// The last line has the priority of an error in the journal, and the form of the log.
func TestLastLineHasTheFormOfTheLog(t *testing.T) {
	failed := errors.New("no \"bridge\"")
	for want, say := range map[string]func(*bytes.Buffer){
		"minicri: no \"bridge\"\n":    func(to *bytes.Buffer) { sayLast(to, false, failed) },
		"<3>minicri: no \"bridge\"\n": func(to *bytes.Buffer) { sayLast(to, true, endError{failed, "text"}) },
		"<3>{\"time\":":               func(to *bytes.Buffer) { sayLast(to, true, endError{failed, "json"}) },
	} {
		var written bytes.Buffer
		say(&written)
		harness.Want(t, strings.HasPrefix(written.String(), want), "%q does not begin with %q", &written, want)
	}
	var written bytes.Buffer
	sayLast(&written, false, endError{failed, "json"})
	var line struct{ Level, Err string }
	err := json.Unmarshal(written.Bytes(), &line)
	harness.Need(t, err == nil, "%s: %v", &written, err)
	harness.Want(t, line.Level == "ERROR", "%s: %v", &written, err)
	harness.Want(t, line.Err == failed.Error(), "%s: %v", &written, err)
	file := filepath.Join(t.TempDir(), "config.toml")
	must(t, os.WriteFile(file, []byte("log_format = 'json'\nshm_size = 1\n"), 0o600))
	err = command(t.Context(), []string{"--config", file}, io.Discard)
	end, is := errors.AsType[endError](err)
	harness.Want(t, is && end.form == "json", "a daemon with a broken configuration: %T: %v", err, err)
}
