package crash

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// The start removes what carries our mark and has no record (P1), and touches nothing else, be it in our directories.
func TestProperty1_OrphansAreSweptAndForeignThingsStay(t *testing.T) {
	n := newNode(t)
	n.runWitness(t)
	mark := strings.TrimSuffix(filepath.Base(harness.Glob(t, n.Netns, "*"+n.witness.Id)[0]), n.witness.Id)
	before := n.Look()
	n.Kill()

	// Another daemon's mark differs in the digits alone.
	foreign := n.makeThings(t, "minicri-00000000-"+strings.Repeat("cd", 32), "somebody", "cni-1234")
	orphans := n.makeThings(t, mark+strings.Repeat("cd", 32))
	n.Start()

	n.checkWitness(t)
	eventually(t, "the orphans are gone", func() bool { gone, all := orphans.gone(); return gone == all })
	gone, all := foreign.gone()
	harness.Want(t, gone == 0, "%d of %d things were taken that were not ours: %v", gone, all, foreign)
	foreign.remove(t)
	n.wantSame(t, before)
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
	made := &things{sleeper: exec.Command("sleep", "600"), ended: make(chan struct{})}
	made.sleeper.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNET}
	harness.Check(t, made.sleeper.Start())
	go func() {
		_ = made.sleeper.Wait() // it is killed
		close(made.ended)
	}()
	pid := strconv.Itoa(made.sleeper.Process.Pid)
	hierarchies, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	harness.Check(t, err)
	for _, name := range names {
		file := filepath.Join(n.Netns, name)
		harness.Check(t, os.WriteFile(file, nil, 0o444))
		harness.Check(t, unix.Mount("/proc/"+pid+"/ns/net", file, "none", unix.MS_BIND, ""))
		made.namespaces = append(made.namespaces, file)
		for _, hierarchy := range hierarchies {
			dir := filepath.Join(hierarchy.Mountpoint, n.CgroupParent, name)
			harness.Check(t, os.Mkdir(dir, 0o755))
			made.cgroups = append(made.cgroups, dir)
			// A new cpuset of version 1 takes no process.
			_ = os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(pid), 0)
		}
	}
	return made
}

// gone counts what is not there any more as it was made, all what there was.
func (m *things) gone() (gone, all int) {
	for _, path := range m.namespaces {
		if mounted, _ := mountinfo.Mounted(path); !mounted {
			gone++
		}
	}
	for _, path := range m.cgroups {
		if _, err := os.Stat(path); err != nil {
			gone++
		}
	}
	select {
	case <-m.ended:
		gone++
	default:
	}
	return gone, len(m.namespaces) + len(m.cgroups) + 1
}

func (m *things) remove(t *testing.T) {
	harness.Check(t, m.sleeper.Process.Kill())
	<-m.ended
	for _, file := range m.namespaces {
		harness.Check(t, unix.Unmount(file, unix.MNT_DETACH))
		harness.Check(t, os.Remove(file))
	}
	for _, dir := range m.cgroups {
		eventually(t, dir+" can be removed", func() bool { return os.Remove(dir) == nil })
	}
}

// A daemon that is killed while it starts a process leaves its socket and its
// locks open in that process, up to the execve. The next daemon waits for that.
func TestStartWhileAnotherProcessHoldsSocketAndLocks(t *testing.T) {
	n := newNode(t)
	n.runWitness(t)
	n.Kill()
	const held = 300 * time.Millisecond
	harness.Check(t, os.Remove(n.Socket))
	listener, err := net.Listen("unix", n.Socket)
	harness.Check(t, err)
	began := time.Now()
	time.AfterFunc(held, func() { listener.Close() })
	lock, err := os.OpenFile(filepath.Join(n.Root, "lock"), os.O_RDWR, 0)
	harness.Check(t, err)
	harness.Check(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB))
	time.AfterFunc(2*held, func() { lock.Close() })

	n.Start()
	took := time.Since(began)
	harness.Want(t, took >= 2*held, "the daemon serves after %v, while its directory was locked", took)
	n.checkWitness(t)
}
