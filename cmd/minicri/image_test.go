package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/crane"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/doctor"
	"github.com/minicri/minicri/internal/inspect"
)

// testImage is an image of one file for this node.
func testImage(t *testing.T) v1.Image {
	t.Helper()
	img, err := crane.Image(map[string][]byte{"file": nil})
	must(t, err)
	spec, err := img.ConfigFile()
	must(t, err)
	spec.OS, spec.Architecture = "linux", runtime.GOARCH
	img, err = mutate.ConfigFile(img, spec)
	must(t, err)
	return img
}

func archiveOf(t *testing.T, img v1.Image, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "archive.tar")
	must(t, crane.Save(img, name, path))
	return path
}

func pushedTo(t *testing.T, img v1.Image) (reference string) {
	t.Helper()
	served := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(served.Close)
	reference = strings.TrimPrefix(served.URL, "http://") + "/pulled:1"
	must(t, crane.Push(img, reference, crane.Insecure))
	return reference
}

// startImageDaemon serves a store as the daemon does.
func startImageDaemon(t *testing.T, root string) (socket string) {
	t.Helper()
	store, err := image.Open(t.Context(), image.Config{Root: root, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	socket = filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	must(t, err)
	mux := http.NewServeMux()
	inspect.ImageRoutes(mux, store, slog.New(slog.DiscardHandler), nil)
	service := &http.Server{Handler: mux}
	go func() { _ = service.Serve(listener) }() // ends with Close
	t.Cleanup(func() {
		_ = service.Close()
		must(t, store.Close())
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
			digest, err := img.Digest()
			must(t, err)
			if got := minicri("ls"); !strings.Contains(got, reference) || strings.Contains(got, "imported") || !strings.Contains(got, "DIGEST") || !strings.Contains(got, shortID(digest.String())) {
				t.Errorf("ls: %q", got)
			}
			minicri("tag", reference, "registry.example/second:1")
			minicri("untag", "registry.example/second:1")
			if got := minicri("ls"); strings.Contains(got, "second") {
				t.Errorf("ls after untag: %q", got)
			}
			if got := minicri("inspect", reference); !strings.Contains(got, `"imageSpec"`) {
				t.Errorf("inspect: %q", got)
			}
			saved := filepath.Join(t.TempDir(), "saved.tar")
			minicri("save", reference, saved)
			if got := minicri("import", saved); !strings.Contains(got, reference) {
				t.Errorf("import of what was saved: %q", got)
			}
			none := filepath.Join(t.TempDir(), "none.tar")
			for _, words := range [][]string{{"rm", "registry.example/typo:1"}, {"untag", "registry.example/typo:1"}, {"save", "registry.example/typo:1", none}, {"tag", "registry.example/typo:1", "a"}} {
				err := runImage(t.Context(), words, imageOptions{Socket: socket, Store: image.Config{Root: root}, Output: io.Discard})
				if err == nil || !strings.Contains(err.Error(), "not found") {
					t.Errorf("%v: %v", words, err)
				}
			}
			if _, err := os.Stat(none); !os.IsNotExist(err) {
				t.Errorf("a save that failed leaves a file: %v", err)
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

// filesBelow are all files and directories, with what they have.
func filesBelow(t *testing.T, dir string) string {
	t.Helper()
	all, err := exec.Command("sh", "-c", `cd "$0" && find . ! -type f -printf '%p %y\n' && find . -type f -exec sha256sum {} +`, dir).Output()
	must(t, err)
	return string(all)
}

// To look at images changes nothing on the disk, and works on a read-only one: what a daemon was downloading
// is there for the next one.
func TestLookingAtImagesChangesNothing(t *testing.T) {
	root := t.TempDir()
	var output bytes.Buffer
	options := imageOptions{Socket: "/nowhere", Store: image.Config{Root: root}, Output: &output}
	must(t, runImage(t.Context(), []string{"import", archiveOf(t, testImage(t), "registry.example/imported:1")}, options))
	ingest := filepath.Join(root, "image", "content", "ingest", "begun")
	must(t, errors.Join(os.MkdirAll(ingest, 0o755), os.WriteFile(filepath.Join(ingest, "data"), []byte("half of a layer"), 0o600)))
	look := func() {
		t.Helper()
		for want, words := range map[string][]string{"imported:1  ": {"ls"}, `"imageSpec"`: {"inspect", "registry.example/imported:1"}} {
			output.Reset()
			if err := runImage(t.Context(), words, options); err != nil || !strings.Contains(output.String(), want) {
				t.Errorf("%v: %v, %q", words, err, output.String())
			}
		}
	}
	before := filesBelow(t, root)
	look()
	if after := filesBelow(t, root); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	must(t, unix.Mount(root, root, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must(t, unix.Unmount(root, unix.MNT_DETACH)) })
	must(t, unix.Mount("", root, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
	look()
}

// A file that is there stays until its successor is whole; a link stays what it is, and
// what is no file is not replaced.
func TestForceKeepsTheFileUntilTheNewOneIsWhole(t *testing.T) {
	dir := t.TempDir()
	old, link, fifo := filepath.Join(dir, "old.tar"), filepath.Join(dir, "link.tar"), filepath.Join(dir, "fifo")
	must(t, errors.Join(os.WriteFile(old, []byte("old"), 0o600), os.Symlink(old, link), unix.Mkfifo(fifo, 0o600)))
	broken := errors.New("broken")
	for _, path := range []string{old, link} {
		err := writeFile(path, true, func(io.Writer) error { return broken })
		if data, _ := os.ReadFile(old); !errors.Is(err, broken) || string(data) != "old" {
			t.Errorf("%s holds %q: %v", path, data, err)
		}
		must(t, writeFile(path, true, func(w io.Writer) error { _, err := io.WriteString(w, "new"); return err }))
		if data, _ := os.ReadFile(old); string(data) != "new" {
			t.Errorf("%s holds %q", path, data)
		}
		must(t, os.WriteFile(old, []byte("old"), 0o600))
	}
	for path, force := range map[string]bool{fifo: true, old: false} {
		if err := writeFile(path, force, func(io.Writer) error { return nil }); err == nil || !strings.Contains(err.Error(), "is there already") {
			t.Errorf("%s is replaced: %v", path, err)
		}
	}
	if all, err := os.ReadDir(dir); err != nil || len(all) != 3 || all[1].Type() != fs.ModeSymlink {
		t.Errorf("left: %v, %v", all, err)
	}
}

func TestPullProgress(t *testing.T) {
	var output bytes.Buffer
	shown := newPullProgress(&output)
	for _, stage := range []image.Stage{image.StageDownload, image.StageUnpack, image.StageDone, image.StageDone} {
		shown.show(image.Progress{Digest: "sha256:0123456789abcdef", Stage: stage, Done: 2048, Total: 2048})
	}
	if want := fmt.Sprintln("0123456789ab  done         2KiB of 2KiB"); output.String() != want {
		t.Errorf("%q, want %q", output.String(), want)
	}
	shown.terminal = true
	for done, bar := range map[int64]string{1024: "[##########          ]", 5000: "[####################]"} { // more than it said
		output.Reset()
		shown.show(image.Progress{Digest: "sha256:second", Stage: image.StageDownload, Done: done, Total: 4096})
		if !strings.Contains(output.String(), bar) || !strings.Contains(output.String(), " of 6KiB, ") || !strings.Contains(output.String(), "KiB/s, 1 of 2 blobs done") {
			t.Errorf("%q lacks %q", output.String(), bar)
		}
	}
}

// A socket that one may not open says nothing of whether a daemon serves.
func TestSocketOfAnotherUser(t *testing.T) {
	root := t.TempDir()
	socket := startImageDaemon(t, root)
	must(t, os.Chmod(socket, 0o600))
	must(t, os.WriteFile(filepath.Join(root, "node.json"), nil, 0o600))
	runtime.LockOSThread() // the user is that of the thread, which is not used again if it stays
	defer runtime.UnlockOSThread()
	_, err := unix.SetfsuidRetUid(65534)
	must(t, err)
	defer func() {
		_, err := unix.SetfsuidRetUid(0)
		must(t, err)
	}()
	options := imageOptions{Socket: socket, Store: image.Config{Root: root}, Output: io.Discard}
	c := config.Default()
	c.Socket, c.Root = socket, root
	findings, err := examine(t.Context(), &config.Loaded{Config: c}, nil)
	if err != nil || len(findings) != 1 || findings[0].Subject != "user" || doctor.Clean(findings) {
		t.Errorf("check: %v, %v", findings, err)
	}
	daemon, _ := askDaemon(t.Context(), socket)
	for what, err := range map[string]error{
		"image": runImage(t.Context(), []string{"ls"}, options), "check": daemon.Err, "check --pod": errors.New(tryPod(t.Context(), c).Message),
	} {
		if err == nil || !strings.Contains(err.Error(), "run this as root: ") || !strings.Contains(err.Error(), socket) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
