package main

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/server"
)

// testImage is an image of one file for this node.
func testImage(t *testing.T) v1.Image {
	t.Helper()
	var plain bytes.Buffer
	w := tar.NewWriter(&plain)
	if err := w.WriteHeader(&tar.Header{Name: "file", Mode: 0o644}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(plain.Bytes())), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	spec = spec.DeepCopy()
	spec.OS, spec.Architecture = "linux", runtime.GOARCH
	if img, err = mutate.ConfigFile(img, spec); err != nil {
		t.Fatal(err)
	}
	return img
}

func digestOf(t *testing.T, img v1.Image) string {
	t.Helper()
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return digest.String()
}

func archiveOf(t *testing.T, img v1.Image, text string) string {
	t.Helper()
	tag, err := name.NewTag(text)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "archive.tar")
	if err := tarball.WriteToFile(path, tag, img); err != nil {
		t.Fatal(err)
	}
	return path
}

func pushedTo(t *testing.T, img v1.Image) (reference string) {
	t.Helper()
	served := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(served.Close)
	reference = strings.TrimPrefix(served.URL, "http://") + "/pulled:1"
	ref, err := name.ParseReference(reference, name.Insecure)
	if err == nil {
		err = remote.Write(ref, img)
	}
	if err != nil {
		t.Fatal(err)
	}
	return reference
}

// startImageDaemon serves a store as the daemon does.
func startImageDaemon(t *testing.T, root string) (socket string) {
	t.Helper()
	store, err := image.Open(t.Context(), image.Config{Root: root, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	socket = filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	service := grpc.NewServer()
	runtimeapi.RegisterImageServiceServer(service, server.NewImageServer(store, func() []string { return nil }, nil))
	server.RegisterImageTransfer(service, store)
	go func() { _ = service.Serve(listener) }() // ends with Stop
	t.Cleanup(func() {
		service.Stop()
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	return socket
}

// TestImageCommand does the same with a daemon and without one.
func TestImageCommand(t *testing.T) {
	for title, daemon := range map[string]bool{"daemon": true, "no daemon": false} {
		t.Run(title, func(t *testing.T) {
			root, socket := t.TempDir(), filepath.Join(t.TempDir(), "none")
			if daemon {
				socket = startImageDaemon(t, root)
			}
			minicri := func(args ...string) string {
				t.Helper()
				var output bytes.Buffer
				options := imageOptions{Socket: socket, Store: image.Config{Root: root}, Output: &output}
				if err := runImage(context.Background(), args, options); err != nil {
					t.Fatalf("minicri image %v: %v", args, err)
				}
				return output.String()
			}
			img := testImage(t)
			reference := pushedTo(t, img)
			if got := minicri("import", archiveOf(t, img, "registry.example/imported:1")); !strings.Contains(got, "registry.example/imported:1") {
				t.Errorf("import: %q", got)
			}
			minicri("rm", "registry.example/imported:1")
			if got := minicri("pull", reference); !strings.Contains(got, "done") || !strings.Contains(got, "sha256:") {
				t.Errorf("pull: %q", got)
			}
			if got := minicri("ls"); !strings.Contains(got, reference) || strings.Contains(got, "imported") {
				t.Errorf("ls: %q", got)
			}
			if got := minicri("ls"); !strings.Contains(got, "DIGEST") || !strings.Contains(got, shortID(digestOf(t, img))) {
				t.Errorf("ls without the digest: %q", got)
			}
			for _, words := range [][]string{{"rm", "registry.example/typo:1"}, {"untag", "registry.example/typo:1"}} {
				err := runImage(t.Context(), words, imageOptions{Socket: socket, Store: image.Config{Root: root}, Output: io.Discard})
				if err == nil || !strings.Contains(err.Error(), "not found") {
					t.Errorf("%v: %v", words, err)
				}
			}
			minicri("rm", reference)
			if got := minicri("ls"); strings.Contains(got, reference) {
				t.Errorf("ls after rm: %q", got)
			}
		})
	}
}

func TestImageCommandTellsWhatIsWrong(t *testing.T) {
	options := imageOptions{Socket: "/nowhere", Store: image.Config{Root: t.TempDir()}, Output: io.Discard}
	for want, args := range map[string][]string{
		"a verb is missing":         {},
		`unknown verb "fetch"`:      {"fetch"},
		"wrong number of arguments": {"pull"},
		"no such file":              {"import", "/nowhere"},
		"image reference":           {"pull", "A B"},
	} {
		if err := runImage(context.Background(), args, options); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", args, err, want)
		}
	}
	asked := options
	asked.Socket = startImageDaemon(t, options.Store.Root)
	if err := runImage(context.Background(), []string{"pull", "A B"}, asked); err == nil || strings.Contains(err.Error(), "rpc error") {
		t.Errorf("the daemon's answer: %v", err)
	}
	// The daemon holds the store; options has another socket.
	if err := runImage(context.Background(), []string{"ls"}, options); err == nil || !strings.Contains(err.Error(), "held by another process") {
		t.Errorf("a store that is held: %v", err)
	}
}

// To look at a machine without images makes no store on it.
func TestListWithoutAStore(t *testing.T) {
	root := filepath.Join(t.TempDir(), "none")
	var output bytes.Buffer
	options := imageOptions{Socket: "/nowhere", Store: image.Config{Root: root}, Output: &output, JSON: true}
	if err := runImage(t.Context(), []string{"ls"}, options); err != nil || output.String() != "[]\n" {
		t.Errorf("%v, %q", err, output.String())
	}
	if err := runImage(t.Context(), []string{"rm", "a"}, options); err == nil {
		t.Error("rm succeeds")
	}
	if _, err := os.Stat(root); err == nil {
		t.Errorf("%s was made", root)
	}
}

func TestLayerLinesOffATerminal(t *testing.T) {
	var output bytes.Buffer
	lines := newLayerLines(&output)
	for _, stage := range []image.Stage{image.StageDownload, image.StageUnpack, image.StageDone, image.StageDone} {
		lines.show(image.Progress{Digest: "sha256:0123456789abcdef", Stage: stage, Done: 2048, Total: 2048})
	}
	lines.end()
	if want := fmt.Sprintln("0123456789ab  done         2 KiB of 2 KiB"); output.String() != want {
		t.Errorf("%q, want %q", output.String(), want)
	}
	if isTerminal(os.Stdin) && isTerminal(&output) {
		t.Error("a buffer is a terminal")
	}
}
