package hostile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// attack: containers: an exec with an argument, or with arguments together, that execve does not take
// held: refused by the size, before anything is started
// field: containerd and CRI-O start the runtime's init, and say what that says
func TestExecBeyondWhatExecveTakes(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox()
	id := newTenant(t, n, "large").run("c")
	for name, command := range map[string][]string{
		"one argument": {"true", strings.Repeat("x", 32*4096)}, "many arguments": append([]string{"true"}, make([]string, 1<<20)...),
	} {
		_, err := n.Runtime.ExecSync(limited(t), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: command})
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "execve(2) takes") || len(err.Error()) > 1024 {
			t.Errorf("%s: %.1000v", name, err)
		}
	}
	if code, output := run(t, n, id, "true", strings.Repeat("x", 32*4096-1)); code != 0 {
		t.Errorf("the largest argument: %d: %s", code, output)
	}
}

// attack: containers: secrets as arguments of execs that fail: a program that is not there, a file that is no program, a time-out, over the streaming server too
// held: the log has the program and the number of arguments, and no argument
// field: containerd logs the whole command line
func TestArgumentsOfExecsAreNotLogged(t *testing.T) {
	const secret = "S3CRETEXEC"
	p := newTarget(t, "")
	for _, command := range [][]string{{"/no/such/program", secret}, {"/etc/hostname", secret}, {"sh", "-c", "sleep 1000", secret}} {
		_, err := p.Runtime.ExecSync(limited(t), &runtimeapi.ExecSyncRequest{ContainerId: p.container, Cmd: command, Timeout: 1})
		if err == nil {
			t.Errorf("%q did not fail", command)
		}
	}
	c := p.upgrade(p.exec("/no/such/program", "-a", secret), "v4.channel.k8s.io")
	ended := c.open(t, "error", 0, 0)
	for _, kind := range []string{"stdin", "stdout", "stderr"} {
		c.open(t, kind, 0, 0)
	}
	status, err := io.ReadAll(ended)
	check(t, err)
	if !strings.Contains(string(status), "Failure") {
		t.Errorf("the status is %s", status)
	}
	log := p.Log()
	if strings.Contains(log, secret) {
		t.Errorf("the log has an argument:\n%s", log)
	}
	for _, want := range []string{"/no/such/program", "/etc/hostname", "permission denied", "with 1 argument", "with 2 arguments", "with 3 arguments"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %q:\n%s", want, log)
		}
	}
}

// attack: containers: root in a container, and in an exec of it, changes the mode of its stdin, which it has none of (chmod on /proc/self/fd/0); also by runc
// held: the node's /dev/null is as it was; the exec reads an end
// field: runc's exec has the node's /dev/null
func TestNullOfAnExecIsNotTheNodes(t *testing.T) {
	path, err := filepath.Abs("../../bin/debian/usr/sbin/runc")
	check(t, err)
	n := harness.NewNode(t, harness.Runtime("runc", path))
	n.ImportBusybox()
	before := modeOfNull(t)
	t.Cleanup(func() { check(t, os.Chmod(os.DevNull, before)) })
	for _, handler := range []string{"", "runc"} {
		pod := n.PodConfig("null" + handler)
		answer, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: pod, RuntimeHandler: handler})
		check(t, err)
		p := &tenant{n, t, pod, answer.GetPodSandboxId()}
		id := p.run("c", func(c *runtimeapi.ContainerConfig) {
			c.Command = []string{"/bin/sh", "-c", "chmod 0600 /proc/self/fd/0; touch /tmp/done; exec sleep 1000000"}
		})
		code, output := run(t, n, id, "/bin/sh", "-c", "until [ -e /tmp/done ]; do sleep 0.1; done; chmod 0600 /proc/self/fd/0; cat; echo end")
		if code != 0 || output != "end\n" {
			t.Errorf("handler %q: %d, %q", handler, code, output)
		}
		if after := modeOfNull(t); after != before {
			t.Errorf("handler %q: the mode of the node's /dev/null is %v, it was %v", handler, after, before)
		}
	}
}

func modeOfNull(t *testing.T) os.FileMode {
	t.Helper()
	info, err := os.Stat(os.DevNull)
	check(t, err)
	return info.Mode().Perm()
}

// written is how many bytes of file a command of the container could write, of
// the many that it tries.
func written(t testing.TB, n *harness.Node, container, file string) int64 {
	t.Helper()
	const most = 128 // MiB, more than anything here may hold
	_, output := run(t, n, container, "/bin/sh", "-c", fmt.Sprintf("dd if=/dev/zero of=%s bs=65536 count=%d 2>/dev/null; wc -c <%s", file, most<<4, file))
	size, err := strconv.ParseInt(strings.TrimSpace(output), 10, 64)
	if err != nil {
		t.Fatalf("%s: %q", file, output)
	}
	return size
}

// attack: containers: root in a container, also a privileged one, writes as much as it can into /etc/hosts, /etc/hostname, /etc/resolv.conf, /dev/shm, /dev and /run of the pod, and makes files there without end
// held: the three files of /etc hold 256 KiB together and /dev/shm its 64 MiB; nothing of it is on the file system of the daemon's state, which other pods use on; other containers of the pod start, and their HOSTNAME is the pod's
// field: containerd and CRI-O keep the three files in directories of the node, without a limit; there, too, HOSTNAME does not come from the file
func TestAContainerCannotFillTheNode(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox()
	for _, privileged := range []bool{false, true} {
		t.Run(fmt.Sprintf("privileged=%t", privileged), func(t *testing.T) {
			p := newTenant(t, n, fmt.Sprintf("fill-%t", privileged), func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = privileged })
			id := p.run("c", func(c *runtimeapi.ContainerConfig) { c.Linux.SecurityContext.Privileged = privileged })
			before := kept(t, n.State)
			files := int64(0)
			for _, file := range []string{"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"} {
				files += written(t, n, id, file)
			}
			if files < 100<<10 || files > 257<<10 {
				t.Errorf("the files of the pod hold %d bytes", files)
			}
			if _, output := run(t, n, p.run("next"), "/bin/sh", "-c", "echo $HOSTNAME"); output != p.pod.Hostname+"\n" {
				t.Errorf("HOSTNAME is %q, want %q", output, p.pod.Hostname)
			}
			for file, most := range map[string]int64{"/dev/shm/x": 64 << 20, "/dev/x": 64 << 20} {
				if size := written(t, n, id, file); size == 0 || size > most {
					t.Errorf("%s holds %d bytes", file, size)
				}
			}
			// A full file system takes no more files either, and inodes have an end.
			code, output := run(t, n, id, "/bin/sh", "-c", "rm /dev/shm/x; i=0; while [ $i -lt 100 ] && echo >/dev/shm/$i; do i=$((i+1)); done; for f in /etc/hosts /etc/hostname /etc/resolv.conf; do : >$f || exit 9; done")
			if code != 0 {
				t.Errorf("the files cannot be made small again: %d: %s", code, output)
			}
			if grown := kept(t, n.State) - before; grown > 64<<10 {
				t.Errorf("the state holds %d bytes more", grown)
			}
		})
	}
	next := n.PodConfig("next")
	n.RunPod(next) // with hostname, hosts and resolv.conf of its own
}

// kept is what a directory holds of its file system, without what is mounted in
// it.
func kept(t testing.TB, directory string) (bytes int64) {
	t.Helper()
	var root unix.Stat_t
	check(t, unix.Stat(directory, &root))
	check(t, filepath.WalkDir(directory, func(path string, entry fs.DirEntry, err error) error {
		var stat unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &stat)
		}
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err == nil && stat.Dev != root.Dev && entry.IsDir():
			return fs.SkipDir
		case err == nil && stat.Dev == root.Dev:
			bytes += stat.Blocks * 512
		}
		return err
	}))
	return bytes
}

// attack: containers: 30000 directories within each other in the writable layer, and 50 MB in the last
// held: they count in the container's disk usage, and are removed with the container
// field: containerd and CRI-O measure by paths, which end at PATH_MAX, and remove with a descriptor for each level
func TestDeepTreeOfAContainer(t *testing.T) {
	const depth, size = 30000, 50 << 20
	n := harness.NewNode(t)
	n.ImportBusybox()
	p := newTenant(t, n, "deep")
	id := p.run("c")
	makeDeep(t, filepath.Join(n.State, "containers", id, "rootfs"), depth, size)
	began := time.Now()
	for usage := uint64(0); usage < size; {
		if time.Since(began) > patience {
			t.Fatalf("the container's usage is %d bytes after %v", usage, patience)
		}
		answer, err := n.Runtime.ContainerStats(limited(t), &runtimeapi.ContainerStatsRequest{ContainerId: id})
		check(t, err)
		usage = answer.GetStats().GetWritableLayer().GetUsedBytes().GetValue()
		time.Sleep(100 * time.Millisecond)
	}
	t.Logf("measured after %v", time.Since(began))
	before := layers(t, n)
	_, err := n.Runtime.RemovePodSandbox(limited(t), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.id})
	check(t, err)
	for began = time.Now(); layers(t, n) >= before; time.Sleep(100 * time.Millisecond) {
		if time.Since(began) > 10*patience {
			t.Fatal("the layer is still there")
		}
	}
	t.Logf("removed after %v", time.Since(began))
}

// makeDeep does what a program in a container would: directories within each other,
// and a file in the last.
func makeDeep(t testing.TB, top string, depth, size int) {
	t.Helper()
	const directory = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC
	at, err := unix.Open(top, directory, 0)
	check(t, err)
	for range depth {
		check(t, unix.Mkdirat(at, "d", 0o755))
		next, err := unix.Openat(at, "d", directory, 0)
		check(t, err)
		check(t, unix.Close(at))
		at = next
	}
	last, err := unix.Openat(at, "last", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
	check(t, err)
	_, err = unix.Write(last, make([]byte, size))
	check(t, err)
	check(t, errors.Join(unix.Close(last), unix.Close(at)))
}

// layers counts the layers that are on the disk.
func layers(t testing.TB, n *harness.Node) int {
	t.Helper()
	all, err := os.ReadDir(filepath.Join(n.Root, "image", "overlayfs", "snapshots"))
	check(t, err)
	return len(all)
}
