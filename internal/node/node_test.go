package node_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
)

func open(t *testing.T, root string) *node.Node {
	n, err := node.Open(root, "/run/state", "/run/netns")
	harness.Check(t, err)
	return n
}

// withRecord writes something that stands for a pod.
func withRecord(t *testing.T, root string) {
	dir := filepath.Join(root, "sandboxes")
	harness.Check(t, errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(dir+"/a.json", nil, 0o600)))
}

// Two nodes have two ids, whatever their paths are, and each keeps its own.
func TestIDIsRandomAndKept(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	first := open(t, a).Mark()
	harness.Same(t, "the mark", open(t, a).Mark(), first)
	other := open(t, b).Mark()
	harness.Want(t, other != first, "two nodes have the mark %s", first)
}

// A node recognises its cgroups in the form of both drivers, and in the form of earlier builds, and no others.
func TestOfCgroup(t *testing.T) {
	n, other := open(t, t.TempDir()), open(t, t.TempDir())
	id, foreign, mark := n.NewID(), other.NewID(), n.Mark()
	harness.Want(t, node.IsID(id), "%q is no id", id)
	for _, test := range []struct{ name, cgroup, id string }{
		{"cgroupfs", id, id},
		{"systemd", "cri-containerd-" + id + ".scope", id},
		{"pod of an earlier build", mark + foreign, foreign},
		{"pod of an earlier build, systemd", mark + foreign + ".scope", foreign},
		{"container of an earlier build", strings.Replace(mark, "-", "-c-", 1) + foreign, foreign},
		{"another node", foreign, ""},
		{"another node, systemd", "cri-containerd-" + foreign + ".scope", ""},
		{"another runtime", strings.Repeat("ab", 32), ""},
		{"longer", id + "0", ""},
		{"not hexadecimal", "x" + id[1:], ""},
		{"plugin", n.PluginMark() + id, ""},
		{"slice", "kubepods-pod" + id + ".slice", ""},
		{"tail alone", n.IDTail(), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, ours := n.OfCgroup(test.cgroup)
			harness.Want(t, ours == (test.id != ""), "%q is ours: %v", test.cgroup, ours)
			if ours {
				harness.Same(t, "id", got, test.id)
			}
		})
	}
}

// While there are pods their directories cannot change; without pods they can, and after a reboot.
func TestChangedDirectoriesAreRefusedWhilePodsRun(t *testing.T) {
	root := t.TempDir()
	open(t, root)
	_, err := node.Open(root, "/run/other", "/run/netns")
	harness.Want(t, err == nil, "without pods: %v", err)
	open(t, root)
	withRecord(t, root)
	_, err = node.Open(root, "/run/other", "/run/netns")
	harness.WantError(t, err, "state", "/run/state")
	_, err = node.Open(root, "/run/state", "/run/other")
	harness.WantError(t, err, "netns_dir", "/run/netns")
	open(t, root)
	dir := t.TempDir() // as /var/run and /run: one directory by another path is none other
	harness.Check(t, errors.Join(os.Mkdir(dir+"/run", 0o755), os.Symlink("run", dir+"/var")))
	for _, path := range []string{dir + "/run", dir + "/var", dir + "/run/"} {
		pods := t.TempDir()
		withRecord(t, pods)
		harness.Check(t, os.Rename(filepath.Join(pods, "sandboxes"), filepath.Join(pods, "later")))
		_, err = node.Open(pods, "/run/state", dir+"/run")
		harness.Check(t, errors.Join(err, os.Rename(filepath.Join(pods, "later"), filepath.Join(pods, "sandboxes"))))
		_, err = node.Open(pods, "/run/state", path)
		harness.Want(t, err == nil, "by the path %s: %v", path, err)
	}
	boot, err := process.BootID()
	harness.Check(t, err)
	file := filepath.Join(root, "node.json")
	harness.Check(t, os.WriteFile(file, bytes.ReplaceAll(harness.Read(t, file), []byte(boot), []byte("before")), 0o600))
	_, err = node.Open(root, "/run/other", "/run/other")
	harness.Want(t, err == nil, "after a reboot: %v", err)
}

// Where cgroups were made is remembered, once, over restarts.
func TestParentsAreKept(t *testing.T) {
	root := t.TempDir()
	n := open(t, root)
	for _, path := range []string{"/kubepods/burstable/pod1/x", "/kubepods/pod2/x", "/minicri/x", "/x", "kubepods.slice/a.slice/x.scope"} {
		harness.Check(t, n.Know(path))
	}
	harness.Same(t, "the parents", open(t, root).Parents(), []string{"/kubepods", "/minicri", "/", "/kubepods.slice"})
}

// A look changes nothing, and a file that makes no sense is no new identity. Records without the file that names
// their node are of a node that is not known: its cgroups and namespaces would not be found again.
func TestRead(t *testing.T) {
	root := t.TempDir()
	_, err := node.Read(root)
	harness.Check(t, err)
	_, err = os.Stat(filepath.Join(root, "node.json"))
	harness.Want(t, os.IsNotExist(err), "a look has made the file: %v", err)
	harness.Check(t, os.WriteFile(filepath.Join(root, "node.json"), []byte("{}"), 0o600))
	_, err = node.Open(root, "/run/state", "/run/netns")
	harness.WantError(t, err, filepath.Join(root, "node.json"))
	root = t.TempDir()
	withRecord(t, root)
	_, err = node.Read(root)
	harness.WantError(t, err, root)
}
