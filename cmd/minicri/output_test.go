package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/minicri/minicri/internal/doctor"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/timeline"
)

// A program that reads the list of a node without pods gets a list.
func TestNoTimelinesAreAnEmptyList(t *testing.T) {
	var output strings.Builder
	root := t.TempDir()
	_, err := node.Open(root, t.TempDir(), t.TempDir())
	must(t, err)
	must(t, timelineCommand(t.Context(), []string{"--json", "--root", root, "--state", t.TempDir()}, &output))
	if output.String() != "[]\n" {
		t.Errorf("%q; want []", output.String())
	}
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
		if err := withoutCode(status.Error(c.code, c.text)); err.Error() != c.want {
			t.Errorf("%v %q: %q, want %q", c.code, c.text, err, c.want)
		}
	}
	if withoutCode(nil) != nil {
		t.Error("no error became one")
	}
}

// An error's text makes no finding of its own.
func TestFindingsAreOneLineEach(t *testing.T) {
	var output strings.Builder
	forged := "a\n✓ b  all is well"
	must(t, printFindings(&output, []doctor.Finding{{Subject: forged, Grade: doctor.Problem, Message: forged, Advice: forged}}, false))
	if lines := strings.Split(strings.TrimSpace(output.String()), "\n"); len(lines) != 2 || strings.HasPrefix(lines[1], "✓") {
		t.Errorf("%q", lines)
	}
}

func TestYAML(t *testing.T) {
	var b strings.Builder
	glance := timeline.Glance{Pods: []timeline.Line{{ID: "1", Name: "a/b: #c", Addresses: []string{"10.0.0.1"}}}}
	must(t, writeYAML(&b, glance.Pods))
	want := "- addresses:\n    - 10.0.0.1\n  containers: 0\n  cpuNanoseconds: 0\n  id: \"1\"\n  memoryBytes: 0\n  name: 'a/b: #c'\n  receivedBytes: 0\n"
	if !strings.HasPrefix(b.String(), want) {
		t.Errorf("%s\nwant\n%s", b.String(), want)
	}
}

func TestPodsAreChosen(t *testing.T) {
	l := timeline.Line{ID: "0123abcd", Name: "shop/cart-1", State: timeline.Ready}
	for f, want := range map[[3]string]bool{ // a name, a namespace, a state
		{}: true, {"", "shop"}: true, {"", "sho"}: false, {"", "", "ready"}: true, {"", "", "not ready"}: false,
		{"cart"}: true, {"shop/ca"}: true, {"0123"}: true, {"shop/x"}: false, {"cart", "x"}: false,
	} {
		if got := asked(l, f[0], f[1], f[2]); got != want {
			t.Errorf("%q: %v", f, got)
		}
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
		if bytes.Contains(content, []byte("S3CRET")) {
			t.Errorf("%s: %s", header.Name, content)
		}
	}
	if got := strings.Join(names, " "); got != "config.json log.txt gone.json.missing networks/10-net.conflist.json networks/broken.json" {
		t.Error(got)
	}
}
