package node

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func open(t *testing.T, root string) *Node {
	t.Helper()
	n, err := Open(root, "/run/state", "/run/netns")
	must(t, err)
	return n
}

// withRecord writes something that stands for a pod.
func withRecord(t *testing.T, root string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Join(root, "sandboxes"), 0o700))
	must(t, os.WriteFile(filepath.Join(root, "sandboxes", "a.json"), nil, 0o600))
}

// Two nodes have two ids, whatever their paths are, and each keeps its own.
func TestIDIsRandomAndKept(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	first := open(t, a).Mark()
	if again := open(t, a).Mark(); again != first {
		t.Errorf("the mark was %s, is %s", first, again)
	}
	if other := open(t, b).Mark(); other == first {
		t.Errorf("two nodes have the mark %s", first)
	}
	if strings.HasPrefix(open(t, a).ContainerMark(), first) || !strings.HasPrefix(first, "minicri-") {
		t.Errorf("the marks are %s and %s", first, open(t, a).ContainerMark())
	}
}

// Records without the file that names their node are of a node that is not known: its
// cgroups and namespaces would not be found again.
func TestRecordsWithoutAnIdentity(t *testing.T) {
	root := t.TempDir()
	withRecord(t, root)
	if _, err := Read(root); err == nil || !strings.Contains(err.Error(), root) {
		t.Errorf("got %v", err)
	}
}

// While there are pods their directories cannot change; without pods they can, and after a reboot.
func TestChangedDirectoriesAreRefusedWhilePodsRun(t *testing.T) {
	root := t.TempDir()
	open(t, root)
	if _, err := Open(root, "/run/other", "/run/netns"); err != nil {
		t.Errorf("without pods: %v", err)
	}
	open(t, root)
	withRecord(t, root)
	if _, err := Open(root, "/run/other", "/run/netns"); err == nil || !strings.Contains(err.Error(), "state") || !strings.Contains(err.Error(), "/run/state") {
		t.Errorf("another state directory: %v", err)
	}
	if _, err := Open(root, "/run/state", "/run/other"); err == nil || !strings.Contains(err.Error(), "netns_dir") || !strings.Contains(err.Error(), "/run/netns") {
		t.Errorf("another netns directory: %v", err)
	}
	open(t, root)
	n, err := Read(root)
	must(t, err)
	n.facts.BootID = "before"
	must(t, n.write())
	if _, err := Open(root, "/run/other", "/run/other"); err != nil {
		t.Errorf("after a reboot: %v", err)
	}
}

// Where cgroups were made is remembered, once, over restarts.
func TestParentsAreKept(t *testing.T) {
	root := t.TempDir()
	n := open(t, root)
	for _, path := range []string{"/kubepods/burstable/pod1/x", "/kubepods/pod2/x", "/minicri/x", "/x", "kubepods.slice/a.slice/x.scope"} {
		must(t, n.Know(path))
	}
	if got, want := open(t, root).Parents(), []string{"/kubepods", "/minicri", "/", "/kubepods.slice"}; !slices.Equal(got, want) {
		t.Errorf("the parents are %q, want %q", got, want)
	}
}

// A look changes nothing, and a file that makes no sense is no new identity.
func TestRead(t *testing.T) {
	root := t.TempDir()
	if _, err := Read(root); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(root, "node.json")); !os.IsNotExist(err) {
		t.Errorf("a look has made the file: %v", err)
	}
	must(t, os.WriteFile(filepath.Join(root, "node.json"), []byte("{}"), 0o600))
	if _, err := Open(root, "/run/state", "/run/netns"); err == nil || !strings.Contains(err.Error(), filepath.Join(root, "node.json")) {
		t.Errorf("Open = %v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
