package crash

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// The start removes what carries our mark and has no record (P1), and
// touches nothing else, be it in our directories.
func TestProperty1_OrphansAreSweptAndForeignThingsStay(t *testing.T) {
	n := newNode(t)
	w := n.runWitness(t)
	ours := n.mark(t, w.Id) + strings.Repeat("cd", 32)
	before := n.Look()
	n.Kill()

	// Another daemon's mark differs in the digits alone.
	theirs := []string{"minicri-00000000-" + strings.Repeat("cd", 32), "somebody", "cni-1234"}
	foreign := n.makeThings(t, theirs...)
	orphans := n.makeThings(t, ours)
	n.Start()

	(&trial{node: n, witness: w}).checkWitness(t)
	eventually(t, "the orphans are gone", func() bool { return orphans.gone() })
	if lost := foreign.lost(); len(lost) > 0 {
		t.Errorf("what was not ours was taken: %v", lost)
	}
	foreign.remove(t)
	n.wantSame(t, before)
}

// mark is what names in the kernel begin with.
func (n *node) mark(t *testing.T, id string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(n.Netns, "*"+id))
	check(t, err)
	if len(files) != 1 {
		t.Fatalf("the namespace of %s: %v", id, files)
	}
	return strings.TrimSuffix(filepath.Base(files[0]), id)
}

// things are what a test made beside what the daemon makes.
type things struct {
	namespaces, cgroups []string
	sleeper             *exec.Cmd
	ended               chan struct{}
}

// makeThings makes, for each name, a pinned network namespace and a cgroup in
// every hierarchy, and a process that is in all of the cgroups.
func (n *node) makeThings(t *testing.T, names ...string) *things {
	t.Helper()
	made := &things{sleeper: exec.Command("unshare", "--net", "sleep", "600"), ended: make(chan struct{})}
	check(t, made.sleeper.Start())
	go func() {
		_ = made.sleeper.Wait() // it is killed
		close(made.ended)
	}()
	eventually(t, "the namespace is there", func() bool {
		own, _ := os.Readlink("/proc/self/ns/net")
		new, err := os.Readlink("/proc/" + strconv.Itoa(made.sleeper.Process.Pid) + "/ns/net")
		return err == nil && new != own
	})
	hierarchies, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	check(t, err)
	for _, name := range names {
		file := filepath.Join(n.Netns, name)
		check(t, os.WriteFile(file, nil, 0o444))
		check(t, unix.Mount("/proc/"+strconv.Itoa(made.sleeper.Process.Pid)+"/ns/net", file, "none", unix.MS_BIND, ""))
		made.namespaces = append(made.namespaces, file)
		for _, hierarchy := range hierarchies {
			dir := filepath.Join(hierarchy.Mountpoint, n.CgroupParent, name)
			check(t, os.Mkdir(dir, 0o755))
			made.cgroups = append(made.cgroups, dir)
			// A new cpuset of version 1 takes no process.
			_ = os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(made.sleeper.Process.Pid)), 0)
		}
	}
	return made
}

func (m *things) all() []string { return append(append([]string{}, m.namespaces...), m.cgroups...) }

func (m *things) gone() bool {
	for _, path := range m.all() {
		if _, err := os.Stat(path); err == nil {
			return false
		}
	}
	select {
	case <-m.ended:
		return true
	default:
		return false
	}
}

// lost are those that are not as they were made.
func (m *things) lost() []string {
	var lost []string
	for _, path := range m.all() {
		if _, err := os.Stat(path); err != nil {
			lost = append(lost, path)
		}
	}
	for _, path := range m.namespaces {
		if mounted, _ := mountinfo.Mounted(path); !mounted {
			lost = append(lost, "mount "+path)
		}
	}
	select {
	case <-m.ended:
		lost = append(lost, "the process")
	default:
	}
	return lost
}

func (m *things) remove(t *testing.T) {
	t.Helper()
	check(t, m.sleeper.Process.Kill())
	<-m.ended
	for _, file := range m.namespaces {
		check(t, unix.Unmount(file, unix.MNT_DETACH))
		check(t, os.Remove(file))
	}
	for _, dir := range m.cgroups {
		eventually(t, dir+" can be removed", func() bool { return os.Remove(dir) == nil })
	}
}
