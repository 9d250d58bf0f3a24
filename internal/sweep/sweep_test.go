package sweep_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/test/isolate"
)

// TestMain keeps the mounts that the tests make away from the machine.
func TestMain(m *testing.M) { os.Exit(isolate.Run(m, nil)) }

var (
	owned  = strings.Repeat("ab", 32)
	orphan = strings.Repeat("cd", 32)
)

// newPlaces are those of a node whose state directory is reached by a symbolic
// link, as /var/run is on many machines.
func newPlaces(t *testing.T) *sweep.Places {
	t.Helper()
	base := t.TempDir()
	root, state, netns := filepath.Join(base, "root"), filepath.Join(base, "state"), filepath.Join(base, "netns")
	must(t, os.MkdirAll(filepath.Join(base, "run", "minicri"), 0o700))
	must(t, os.Symlink(filepath.Join(base, "run", "minicri"), state))
	must(t, os.Mkdir(root, 0o700))
	identity, err := node.Open(root, state, netns)
	must(t, err)
	return &sweep.Places{
		Node: identity, Root: root, State: state, Kill: time.Minute,
		Netns: namespace.Find(netns, identity.Mark()), Userns: namespace.Find(filepath.Join(state, "userns"), identity.Mark()),
	}
}

// known are the owners of a node with one pod and one container, both owned.
func known(attached ...string) sweep.Owners {
	is := func(id string) bool { return id == owned }
	return sweep.Owners{Pod: is, Container: is, Attached: func(id string) bool { return slices.Contains(attached, id) }}
}

func makeDirs(t *testing.T, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		must(t, os.MkdirAll(dir, 0o700))
	}
}

// Orphans of pods and of containers are found and removed; what has an owner, what
// is named by no id and what another node has made stays.
func TestOrphansOfPodsAndContainers(t *testing.T) {
	p := newPlaces(t)
	in := func(dir, name string) string { return filepath.Join(p.State, dir, name) }
	mark := p.Node.Mark()
	orphans := []string{
		in("containers", orphan), filepath.Join(p.Root, "container-volumes", orphan),
		filepath.Join(filepath.Dir(p.Netns.Path("x")), mark+orphan), in("sandboxes", orphan),
	}
	stay := []string{
		in("shims", orphan), in("containers", owned), in("containers", "notes"), in("sandboxes", owned),
		filepath.Join(filepath.Dir(p.Netns.Path("x")), mark+owned), filepath.Join(filepath.Dir(p.Netns.Path("x")), "minicri-00000000-"+orphan),
	}
	makeDirs(t, append(slices.Clone(orphans), stay...)...)
	found, err := p.Find(known())
	must(t, err)
	var paths []string
	for _, o := range found {
		paths = append(paths, o.Path)
	}
	if !slices.Equal(paths, orphans) {
		t.Errorf("found %q\nwant  %q", paths, orphans)
	}
	for _, o := range found {
		if o.Kind == sweep.Netns {
			continue // a directory is no namespace; package namespace tests their removal
		}
		must(t, p.Remove(o))
		if _, err := os.Lstat(o.Path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s %s is left: %v", o.Kind, o.Path, err)
		}
	}
	for _, path := range stay {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("removed, though it is no orphan: %v", err)
		}
	}
	if found, err := p.Find(known(orphan)); err != nil || len(found) != 0 {
		t.Errorf("the namespace of an attachment that waits for its DEL: %v, %v", found, err)
	}
}

// What is mounted in an orphan is unmounted and not emptied, also where the state
// directory is reached by a symbolic link.
func TestMountsOfAnOrphanAreNotEmptied(t *testing.T) {
	p := newPlaces(t)
	volume := t.TempDir()
	file := filepath.Join(volume, "data")
	must(t, os.WriteFile(file, []byte("precious"), 0o600))
	mounted := filepath.Join(p.State, "containers", orphan, "images", "0")
	makeDirs(t, mounted)
	must(t, unix.Mount(volume, mounted, "", unix.MS_BIND, ""))
	found, err := p.Find(known())
	must(t, err)
	if len(found) != 1 {
		t.Fatalf("found %v", found)
	}
	must(t, p.Remove(found[0]))
	if _, err := os.Lstat(found[0].Path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is left: %v", err)
	}
	if content, err := os.ReadFile(file); err != nil || string(content) != "precious" {
		t.Errorf("what was mounted is gone: %q, %v", content, err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
