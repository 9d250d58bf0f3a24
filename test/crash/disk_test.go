package crash

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// onSmallDisk starts the node's daemon anew with the directory on a file
// system of its own, of little more than the daemon needs.
func (n *node) onSmallDisk(t *testing.T, directory string) {
	n.Stop()
	n.endSupervisors(t)
	harness.Check(t, unix.Mount("small", directory, "tmpfs", 0, "size=256k,mode=755"))
	t.Cleanup(func() { n.offSmallDisk(t, directory) })
	n.Start()
}

func (n *node) offSmallDisk(t *testing.T, directory string) {
	for _, pod := range n.list(t) {
		n.RemovePod(pod.Id)
	}
	n.Stop()
	n.endSupervisors(t)
	harness.Check(t, unix.Unmount(directory, unix.MNT_DETACH))
	n.Start()
}

// endSupervisors ends those of a node whose directories are exchanged: it is another
// node then, and they would serve beside its own.
func (n *node) endSupervisors(t *testing.T) {
	harness.Eventually(t, "the supervisors have ended", func() bool {
		left := n.Supervisors()
		for _, pid := range left {
			_ = unix.Kill(pid, unix.SIGKILL) // it may be gone by now
		}
		return len(left) == 0
	})
}

func fill(t *testing.T, directory string) (free func()) {
	name := filepath.Join(directory, "filler")
	file, err := os.Create(name)
	harness.Check(t, err)
	defer file.Close()
	for block := make([]byte, 4096); err == nil; {
		_, err = file.Write(block)
	}
	harness.Need(t, errors.Is(err, unix.ENOSPC), "filling %s: %v", directory, err)
	return func() { harness.Check(t, os.Remove(name)) }
}

// On a full disk requests fail and say why, nothing is half there, and what was there stays, over a restart too. Pods
// can go, and do not come back with a restart. With space requests work again.
func TestProperty48_FullDisk(t *testing.T) {
	for _, directory := range []string{"root", "state"} {
		for _, option := range []nodetest.PodOption{nodetest.HostNetwork(), nodetest.HostPort(8080, 80), nodetest.UserNamespace} {
			t.Run(directory, func(t *testing.T) {
				n := newNode(t)
				disk := filepath.Join(n.Dir, directory)
				n.onSmallDisk(t, disk)
				n.runWitness(t)
				before := n.Look()
				stopped, removed := n.RunPod(n.PodConfig("stopped")), n.RunPod(n.PodConfig("removed"))
				free := fill(t, disk)

				const reason = "no space left on device"
				config := n.PodConfig("late", option)
				n.wantNoRoom(t, config, reason)
				n.wantListed(t, n.witness.Id, stopped, removed)
				n.Crash()
				n.checkWitness(t)
				n.wantNoRoom(t, config, reason)

				err := n.stop(harness.Limited(t), stopped)
				harness.Want(t, err == nil || strings.Contains(err.Error(), reason), "%v", err)
				n.wantState(t, stopped, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
				if err := n.remove(harness.Limited(t), removed); err != nil {
					t.Logf("the first Remove: %v", err)
					harness.Check(t, n.remove(harness.Limited(t), removed))
				}
				n.Crash()
				n.wantListed(t, n.witness.Id, stopped)
				n.wantState(t, stopped, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
				free()
				n.RemovePod(stopped)
				n.wantSame(t, before)
				n.RemovePod(n.RunPod(config))
				n.wantSame(t, before)
			})
		}
	}
}

func (n *node) wantNoRoom(t *testing.T, config *runtimeapi.PodSandboxConfig, reason string) {
	_, err := n.run(harness.Limited(t), config)
	harness.Want(t, strings.Contains(fmt.Sprint(err), reason), "want an error that says %q, got %v", reason, err)
}

// On a disk that went read-only requests fail and say why, and so does a start; when it can be written again they work.
func TestProperty48_ReadOnlyDisk(t *testing.T) {
	for _, directory := range []string{"root", "state"} {
		t.Run(directory, func(t *testing.T) {
			const reason = "read-only file system"
			n := newNode(t)
			before := n.Look()
			n.runWitness(t)
			writable := readOnly(t, filepath.Join(n.Dir, directory))

			n.wantNoRoom(t, n.PodConfig("late"), reason)
			n.wantListed(t, n.witness.Id)
			n.checkWitness(t)
			err := n.stop(harness.Limited(t), n.witness.Id)
			harness.Want(t, strings.Contains(fmt.Sprint(err), reason), "Stop of what cannot be noted: %v", err)
			n.wantState(t, n.witness.Id, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
			n.Kill()
			output, err := n.RunDaemon()
			harness.Want(t, err != nil && strings.Contains(output, reason), "a start on a disk that cannot be written: %v: %s", err, output)

			writable()
			n.Start()
			n.wantState(t, n.witness.Id, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
			n.RemovePod(n.witness.Id)
			n.RemovePod(n.RunPod(n.PodConfig("late")))
			n.wantSame(t, before)
		})
	}
}

// readOnly mounts the directory over itself, read-only: a daemon that holds a
// file open for writing would not let it be remounted.
func readOnly(t *testing.T, directory string) (writable func()) {
	harness.Check(t, unix.Mount(directory, directory, "", unix.MS_BIND, ""))
	harness.Check(t, unix.Mount("", directory, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	return func() { harness.Check(t, unix.Unmount(directory, unix.MNT_DETACH)) }
}

// With no descriptor to spare, at whichever of its steps, a request fails or
// succeeds, and leaves nothing; with some to spare it works again.
func TestProperty48_NoDescriptors(t *testing.T) {
	n := newNode(t)
	n.runWitness(t)
	before := n.Look()
	config := n.PodConfig("case", nodetest.HostPort(8080, 80))
	failed := 0
	for spare := range 40 {
		open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.PID()))
		harness.Check(t, err)
		was := n.limitDescriptors(t, uint64(len(open)+spare))
		id, err := n.run(harness.Limited(t), config)
		stillThere := n.status(t, n.witness.Id)
		n.limitDescriptors(t, was)
		harness.Want(t, stillThere.String() == n.witness.String(), "%d to spare: the other pod changed: %v", spare, stillThere)
		if err != nil {
			failed++
		}
		for _, pod := range n.list(t) {
			if pod.Id != n.witness.Id {
				harness.Want(t, err != nil || pod.Id == id, "%d to spare: unexpected sandbox %v", spare, pod)
				n.RemovePod(pod.Id)
			}
		}
		for _, difference := range n.Differences(before) {
			t.Errorf("%d to spare: %s", spare, difference)
		}
	}
	harness.Want(t, failed != 0 && failed != 40, "%d of 40 requests failed: the limits are not where they bite", failed)
	t.Logf("%d of 40 requests failed", failed)
	n.RunPod(config)
}

func (n *node) limitDescriptors(t *testing.T, limit uint64) (was uint64) {
	var old unix.Rlimit
	harness.Check(t, unix.Prlimit(n.PID(), unix.RLIMIT_NOFILE, nil, &old))
	was = old.Cur
	old.Cur = limit
	harness.Check(t, unix.Prlimit(n.PID(), unix.RLIMIT_NOFILE, &old, nil))
	return was
}

// A file that cannot be read now, whichever it is, costs no pod anything: the daemon serves without it, or refuses to
// start and names it; no process ends, no address is given back. When it can be read again all is as it was.
func TestProperty48_EIOAtEachFile(t *testing.T) {
	n := newNode(t)
	were := n.runEachKind(t)
	for _, file := range n.files(t) {
		name, err := filepath.Rel(n.Dir, file)
		harness.Check(t, err)
		for _, was := range were {
			name = strings.ReplaceAll(name, was.Id, was.Metadata.Name)
		}
		t.Run(name, func(t *testing.T) {
			n.Kill()
			if _, err := os.Lstat(file); errors.Is(err, fs.ErrNotExist) && strings.Contains(file, "/content/ingest/") {
				t.Skip("it was being written when files killed the daemon, and a start has removed it")
			}
			readable := unreadable(t, file)
			if err := n.TryStart(); err == nil {
				n.wantNothingLost(t, were)
				n.Kill()
			} else if !strings.Contains(n.Log(), file) || !strings.Contains(n.Log(), unix.EIO.Error()) {
				t.Errorf("the daemon does not start and does not name the file: %v", err)
			}
			readable()
			n.Start()
			n.wantNothingLost(t, were)
			for _, was := range were {
				same(t, "status of the pod", n.status(t, was.Id), was)
			}
		})
	}
	for _, was := range were {
		n.RemovePod(was.Id)
	}
	n.fillNetwork()
}

// files are those that the daemon reads at its start.
func (n *node) files(t *testing.T) (files []string) {
	n.Kill() // nothing is being written
	for _, dir := range []string{n.Root, n.State} {
		harness.Check(t, filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.Type().IsRegular() && entry.Name() != "pause" {
				files = append(files, path)
			}
			if entry.IsDir() && (entry.Name() == "sandboxes" && dir == n.State || entry.Name() == "libcontainer") {
				return fs.SkipDir // files of the pods, which are not read at a start
			}
			return err
		}))
	}
	n.Start()
	return files
}

// unreadable makes every read of the file fail with EIO: nothing is mapped at
// the beginning of a process's memory (proc(5), /proc/PID/mem).
func unreadable(t *testing.T, file string) (readable func()) {
	harness.Check(t, unix.Mount("/proc/self/mem", file, "", unix.MS_BIND, ""))
	_, err := os.ReadFile(file)
	harness.Need(t, err != nil && strings.Contains(err.Error(), unix.EIO.Error()), "reading %s: %v", file, err)
	return func() { harness.Check(t, unix.Unmount(file, unix.MNT_DETACH)) }
}

// wantNothingLost: every pause lives, and every address is still out.
func (n *node) wantNothingLost(t *testing.T, were []*runtimeapi.PodSandboxStatus) {
	running := 0
	for _, pid := range n.processes(t) {
		if alive(pid) {
			running++
		}
	}
	harness.Want(t, running == len(were), "%d of %d pause processes live", running, len(were))
	for _, was := range were {
		if ip := was.GetNetwork().GetIp(); ip != "" {
			_, err := os.Stat(filepath.Join(n.Addresses, ip))
			harness.Want(t, err == nil, "the address of a pod that is Ready was given back: %v", err)
		}
	}
}
