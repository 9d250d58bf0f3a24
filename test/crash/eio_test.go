package crash

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// A file that cannot be read now, whichever it is, costs no pod anything: the
// daemon serves without it, or refuses to start and names it; no process ends, no
// address is given back. When it can be read again all is as it was.
func TestProperty48_EIOAtEachFile(t *testing.T) {
	n := newNode(t)
	var were []*runtimeapi.PodSandboxStatus
	for _, config := range []*runtimeapi.PodSandboxConfig{
		n.PodConfig("own", harness.HostPort(8080, 80)), n.PodConfig("userns", harness.UserNamespace), n.PodConfig("host", harness.HostNetwork()),
	} {
		were = append(were, n.status(t, n.RunPod(config)))
	}
	for _, file := range n.files(t) {
		name, err := filepath.Rel(n.Dir, file)
		check(t, err)
		for _, was := range were {
			name = strings.ReplaceAll(name, was.Id, was.Metadata.Name)
		}
		t.Run(name, func(t *testing.T) {
			n.Kill()
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
				if now := n.status(t, was.Id); now.String() != was.String() {
					t.Errorf("the pod changed:\nwas %v\nis  %v", was, now)
				}
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
	t.Helper()
	n.Kill() // nothing is being written
	for _, dir := range []string{n.Root, n.State} {
		check(t, filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
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
	t.Helper()
	check(t, unix.Mount("/proc/self/mem", file, "", unix.MS_BIND, ""))
	if _, err := os.ReadFile(file); err == nil || !strings.Contains(err.Error(), unix.EIO.Error()) {
		t.Fatalf("reading %s: %v", file, err)
	}
	return func() { check(t, unix.Unmount(file, unix.MNT_DETACH)) }
}

// wantNothingLost: every pause lives, and every address is still out.
func (n *node) wantNothingLost(t *testing.T, were []*runtimeapi.PodSandboxStatus) {
	t.Helper()
	running := 0
	for _, pid := range n.processes(t) {
		if alive(pid) {
			running++
		}
	}
	if running != len(were) {
		t.Errorf("%d of %d pause processes live", running, len(were))
	}
	for _, was := range were {
		if ip := was.GetNetwork().GetIp(); ip != "" {
			if _, err := os.Stat(filepath.Join(n.Addresses, ip)); err != nil {
				t.Errorf("the address of a pod that is Ready was given back: %v", err)
			}
		}
	}
}
