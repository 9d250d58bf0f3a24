package main

import (
	"bytes"
	"errors"
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
	"slices"
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
	"github.com/minicri/minicri/test/harness"
)

// testImage is an image of one file for this node.
func testImage(t *testing.T) v1.Image {
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
	path := filepath.Join(t.TempDir(), "archive.tar")
	must(t, crane.Save(img, name, path))
	return path
}

func pushedTo(t *testing.T, img v1.Image) (reference string) {
	served := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(served.Close)
	reference = strings.TrimPrefix(served.URL, "http://") + "/pulled:1"
	must(t, crane.Push(img, reference, crane.Insecure))
	return reference
}

// startImageDaemon serves a store as the daemon does, below the state directory that it returns.
func startImageDaemon(t *testing.T, root string) (state string) {
	store, err := image.Open(t.Context(), image.Config{Root: root, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	state = t.TempDir()
	listener, err := net.Listen("unix", inspect.DebugSocket(state))
	must(t, err)
	mux := http.NewServeMux()
	inspect.ImageRoutes(mux, store, slog.New(slog.DiscardHandler), nil)
	service := &http.Server{Handler: mux}
	go func() { _ = service.Serve(listener) }() // ends with Close
	t.Cleanup(func() {
		_ = service.Close()
		must(t, store.Close())
	})
	return state
}

// runImage runs a command of images on the directories of a daemon, and returns its output.
func runImage(t *testing.T, root, state string, words ...string) (string, error) {
	var output bytes.Buffer
	arguments := slices.Concat([]string{"image", "--root", root, "--state", state}, words)
	err := command(t.Context(), arguments, &output)
	return output.String(), err
}

// TestImageCommand does the same with a daemon and without one.
func TestImageCommand(t *testing.T) {
	for title, daemon := range map[string]bool{"daemon": true, "no daemon": false} {
		t.Run(title, func(t *testing.T) {
			root, state := t.TempDir(), filepath.Join(t.TempDir(), "none")
			if daemon {
				state = startImageDaemon(t, root)
			}
			minicri := func(args ...string) string {
				output, err := runImage(t, root, state, args...)
				harness.Need(t, err == nil, "minicri image %v: %v", args, err)
				return output
			}
			img := testImage(t)
			reference := pushedTo(t, img)
			got := minicri("import", archiveOf(t, img, "registry.example/imported:1"))
			harness.Want(t, strings.Contains(got, "registry.example/imported:1"), "import: %q", got)
			minicri("rm", "registry.example/imported:1")
			got = minicri("pull", reference)
			harness.Want(t, strings.Contains(got, "done") && strings.Contains(got, "sha256:"), "pull: %q", got)
			digest, err := img.Digest()
			must(t, err)
			if got := minicri("ls"); !strings.Contains(got, reference) || strings.Contains(got, "imported") || !strings.Contains(got, "DIGEST") || !strings.Contains(got, shortID(digest.String())) {
				t.Errorf("ls: %q", got)
			}
			minicri("tag", reference, "registry.example/second:1")
			_, got, _ = strings.Cut(minicri("ls"), "registry.example/second:1")
			harness.Want(t, strings.Contains(got, shortID(digest.String())), "ls of a name that no registry has: %q", got)
			minicri("untag", "registry.example/second:1")
			got = minicri("ls")
			harness.Want(t, !strings.Contains(got, "second"), "ls after untag: %q", got)
			got = minicri("inspect", reference)
			harness.Want(t, strings.Contains(got, `"imageSpec"`), "inspect: %q", got)
			saved := filepath.Join(t.TempDir(), "saved.tar")
			minicri("save", reference, saved)
			got = minicri("import", saved)
			harness.Want(t, strings.Contains(got, reference), "import of what was saved: %q", got)
			none := filepath.Join(t.TempDir(), "none.tar")
			for _, words := range [][]string{{"rm", "registry.example/typo:1"}, {"untag", "registry.example/typo:1"}, {"save", "registry.example/typo:1", none}, {"tag", "registry.example/typo:1", "a"}} {
				_, err := runImage(t, root, state, words...)
				harness.Want(t, err != nil && strings.Contains(err.Error(), "not found"), "%v: %v", words, err)
			}
			_, err = os.Stat(none)
			harness.Want(t, os.IsNotExist(err), "a save that failed leaves a file: %v", err)
			minicri("rm", reference)
			got = minicri("ls")
			harness.Want(t, !strings.Contains(got, reference), "ls after rm: %q", got)
		})
	}
}

func TestImageCommandTellsWhatIsWrong(t *testing.T) {
	root := t.TempDir()
	for _, c := range []struct {
		want string
		args []string
	}{
		{"the command is missing", nil},
		{`unknown command "minicri image fetch"`, []string{"fetch"}},
		{"REFERENCE is missing", []string{"pull"}},
		{"no such file", []string{"import", "/nowhere"}},
		{"image reference", []string{"pull", "A B"}},
	} {
		_, err := runImage(t, root, "/nowhere", c.args...)
		harness.WantError(t, err, c.want)
	}
	_, err := runImage(t, root, startImageDaemon(t, root), "pull", "A B")
	harness.Want(t, err != nil && !strings.Contains(err.Error(), "rpc error"), "the daemon's answer: %v", err)
	// The daemon holds the store, and serves another directory.
	_, err = runImage(t, root, "/nowhere", "ls")
	harness.WantError(t, err, "held by another process")
}

// To look at a machine without images makes no store on it.
func TestListWithoutAStore(t *testing.T) {
	root := filepath.Join(t.TempDir(), "none")
	output, err := runImage(t, root, "/nowhere", "list", "--json")
	harness.Want(t, err == nil && output == "[]\n", "%v, %q", err, output)
	_, err = runImage(t, root, "/nowhere", "remove", "a")
	harness.Want(t, err != nil, "rm succeeds")
	_, err = os.Stat(root)
	harness.Want(t, err != nil, "%s was made", root)
}

// filesBelow are all files and directories, with what they have.
func filesBelow(t *testing.T, dir string) string {
	all, err := exec.Command("sh", "-c", `cd "$0" && find . ! -type f -printf '%p %y\n' && find . -type f -exec sha256sum {} +`, dir).Output()
	must(t, err)
	return string(all)
}

// To look at images changes nothing on the disk, and works on a read-only one: what a daemon was downloading
// is there for the next one.
func TestLookingAtImagesChangesNothing(t *testing.T) {
	root := t.TempDir()
	_, err := runImage(t, root, "/nowhere", "import", archiveOf(t, testImage(t), "registry.example/imported:1"))
	must(t, err)
	ingest := filepath.Join(root, "image", "content", "ingest", "begun")
	must(t, errors.Join(os.MkdirAll(ingest, 0o755), os.WriteFile(filepath.Join(ingest, "data"), []byte("half of a layer"), 0o600)))
	look := func() {
		for want, words := range map[string][]string{"imported:1  ": {"ls"}, `"imageSpec"`: {"inspect", "registry.example/imported:1"}} {
			output, err := runImage(t, root, "/nowhere", words...)
			harness.Want(t, err == nil && strings.Contains(output, want), "%v: %v, %q", words, err, output)
		}
	}
	before := filesBelow(t, root)
	look()
	harness.Same(t, "what is on the disk", filesBelow(t, root), before)
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
		data, _ := os.ReadFile(old)
		harness.Want(t, errors.Is(err, broken) && string(data) == "old", "%s holds %q: %v", path, data, err)
		must(t, writeFile(path, true, func(w io.Writer) error { _, err := io.WriteString(w, "new"); return err }))
		data, _ = os.ReadFile(old)
		harness.Want(t, string(data) == "new", "%s holds %q", path, data)
		must(t, os.WriteFile(old, []byte("old"), 0o600))
	}
	for path, force := range map[string]bool{fifo: true, old: false} {
		harness.WantError(t, writeFile(path, force, func(io.Writer) error { return nil }), "is there already")
	}
	all, err := os.ReadDir(dir)
	harness.Need(t, err == nil && len(all) == 3, "left: %v, %v", all, err)
	harness.Want(t, all[1].Type() == fs.ModeSymlink, "left: %v, %v", all, err)
}

func TestPullProgress(t *testing.T) {
	var output bytes.Buffer
	shown := newPullProgress(&output)
	for _, stage := range []image.Stage{image.StageDownload, image.StageUnpack, image.StageDone, image.StageDone} {
		shown.show(image.Progress{Digest: "sha256:0123456789abcdef", Stage: stage, Done: 2048, Total: 2048})
	}
	harness.Same(t, "what is shown", output.String(), "0123456789ab  done         2KiB of 2KiB\n")
	shown.terminal = true
	for done, bar := range map[int64]string{1024: "[##########          ]", 5000: "[####################]"} { // more than it said
		output.Reset()
		shown.show(image.Progress{Digest: "sha256:second", Stage: image.StageDownload, Done: done, Total: 4096})
		harness.Want(t, strings.Contains(output.String(), bar), "%q lacks %q", output.String(), bar)
		harness.Want(t, strings.Contains(output.String(), " of 6KiB, "), "%q lacks %q", output.String(), bar)
		harness.Want(t, strings.Contains(output.String(), "KiB/s, 1 of 2 blobs done"),
			"%q lacks %q", output.String(), bar)
	}
}

// A socket that one may not open says nothing of whether a daemon serves.
func TestSocketOfAnotherUser(t *testing.T) {
	root := t.TempDir()
	state := startImageDaemon(t, root)
	socket := inspect.DebugSocket(state)
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
	c := config.Default()
	c.Socket, c.Root = socket, root
	findings, err := examine(t.Context(), &config.Loaded{Config: c})
	harness.Need(t, err == nil && len(findings) == 1, "check: %v, %v", findings, err)
	harness.Want(t, findings[0].Subject == "user", "check: %v, %v", findings, err)
	harness.Want(t, !doctor.Clean(findings), "check: %v, %v", findings, err)
	daemon, _ := askDaemon(t.Context(), socket)
	_, err = runImage(t, root, state, "ls")
	for what, err := range map[string]error{
		"image": err, "check": daemon.Err, "check --pod": errors.New(tryPod(t.Context(), c).Message),
	} {
		harness.Need(t, err != nil, "%s: %v", what, err)
		harness.Want(t, strings.Contains(err.Error(), "run this as root: "), "%s: %v", what, err)
		harness.Want(t, strings.Contains(err.Error(), socket), "%s: %v", what, err)
	}
}
