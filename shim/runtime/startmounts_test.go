package runtime

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/cgroups/devices/config"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

func TestWithoutThoseBelow(t *testing.T) {
	for _, test := range []struct {
		paths, want []mountedPath
		why         string
	}{
		{paths: []mountedPath{{"/b", false}, {"/a", true}}, want: []mountedPath{{"/a", true}, {"/b", false}}},
		{paths: []mountedPath{{"/a", false}, {"/a", true}, {"/a", false}}, want: []mountedPath{{"/a", true}}},
		{paths: []mountedPath{{"/dev/kvm", false}, {"/dev", true}, {"/development", false}}, want: []mountedPath{{"/dev", true}, {"/development", false}}},
		{paths: []mountedPath{{"/a/b", false}, {"/a-b", false}, {"/a", false}}, why: "/a/b is below /a"},
		{paths: []mountedPath{{"/a/b/c/d", false}, {"/a/b", false}}, why: "/a/b/c/d is below /a/b"},
		{paths: []mountedPath{{"/", true}}, why: `"/" is bound`},
		{paths: []mountedPath{{"a", true}}, why: `"a" is bound`},
		{paths: []mountedPath{{"/a/../b", true}}, why: `"/a/../b" is bound`},
		{paths: []mountedPath{{"", true}}, why: `"" is bound`},
		{paths: many(maxTrees), want: many(maxTrees)},
		{paths: many(maxTrees + 1), why: "there are 257 of them"},
	} {
		got, why := withoutThoseBelow(slices.Clone(test.paths))
		if why != test.why || !reflect.DeepEqual(got, test.want) {
			t.Errorf("of %v: %v, %q; want %v, %q", test.paths, got, why, test.want, test.why)
		}
	}
}

func many(n int) (paths []mountedPath) {
	for i := range n {
		paths = append(paths, mountedPath{fmt.Sprintf("/volume%04d", i), true})
	}
	return paths
}

func TestNeedsNodesMounts(t *testing.T) {
	its := configs.Namespaces{{Type: configs.NEWNS}}
	for want, config := range map[string]*configs.Config{
		"":                         {Namespaces: its, Devices: []*config.Device{{Path: "/dev/fuse"}}},
		"mounts that are not its":  {},
		"mounts that are not its ": {Namespaces: configs.Namespaces{{Type: configs.NEWNS, Path: "/proc/1/ns/mnt"}}},
		"hooks":                    {Namespaces: its, Hooks: configs.Hooks{configs.CreateRuntime: nil}},
		"seccomp":                  {Namespaces: its, Seccomp: &configs.Seccomp{ListenerPath: "/run/agent"}},
		"resctrl":                  {Namespaces: its, IntelRdt: &configs.IntelRdt{}},
		"a signal":                 {Namespaces: its, ParentDeathSignal: 9},
		"no root":                  {Namespaces: its, RootlessCgroups: true},
		"mount on /copied":         {Namespaces: its, Mounts: []*configs.Mount{{Destination: "/copied", Extensions: configs.EXT_COPYUP}}},
		"/device":                  {Namespaces: its, Devices: []*config.Device{{Path: "/device"}}},
		"/dev/../sda":              {Namespaces: its, Devices: []*config.Device{{Path: "/dev/../sda"}}},
	} {
		if why := needsNodesMounts(config); !strings.Contains(why, want) || (want == "") != (why == "") {
			t.Errorf("%q, want %q", why, want)
		}
	}
}

// What starts sees what it asked for and nothing else, shared as it is on the node,
// and the node sees nothing of it.
func TestAmongMounts(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	shareMounts(t, dir)
	file := filepath.Join(dir, "file")
	shared, inner := filepath.Join(dir, "shared"), filepath.Join(dir, "shared", "inner")
	err := errors.Join(os.WriteFile(file, []byte("content"), 0o600), os.MkdirAll(inner, 0o755), unix.Mount("tmpfs", inner, "tmpfs", 0, ""))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(inner, unix.MNT_DETACH)
	before := read("/proc/thread-self/mountinfo")

	var there, content, ofNode string
	started, err := n.amongMounts([]mountedPath{{"/proc", true}, {file, false}, {shared, true}}, func() error {
		there, content = read("/proc/thread-self/mountinfo"), read(file)
		var other sync.WaitGroup
		other.Go(func() { ofNode = read("/proc/thread-self/mountinfo") })
		other.Wait()
		return errors.New("of the start")
	})
	if !started || fmt.Sprint(err) != "of the start" {
		t.Fatal(started, err)
	}
	if content != "content" {
		t.Errorf("the file has %q", content)
	}
	if after := read("/proc/thread-self/mountinfo"); after != before || ofNode != before {
		t.Errorf("the node's mounts have changed:\n%s\nmeanwhile\n%s\nand then\n%s", before, ofNode, after)
	}
	var seen []string
	for line := range strings.Lines(there) {
		seen = append(seen, strings.Fields(line)[4])
	}
	for _, path := range []string{file, shared, inner} {
		if group := groupOf(there, path); group == "" || path == inner && group != groupOf(before, path) {
			t.Errorf("%s is of group %q, of %q on the node", path, group, groupOf(before, path))
		}
	}
	seen = slices.DeleteFunc(seen, func(path string) bool { return path == "/" || isBelow(path, "/proc") })
	slices.Sort(seen)
	if want := []string{file, shared, inner}; !slices.Equal(seen, want) {
		t.Errorf("seen are %v, want %v", seen, want)
	}
}

// groupOf is the peer group of the mount on a path (mountinfo: proc_pid_mountinfo(5)).
func groupOf(mountinfo, path string) string {
	for line := range strings.Lines(mountinfo) {
		if fields := strings.Fields(line); fields[4] == path {
			return regexp.MustCompile(`shared:\d+`).FindString(line)
		}
	}
	return ""
}

// Where something is missing nothing is started, and the error names it.
func TestAmongMountsThatAreMissing(t *testing.T) {
	n := newNode(t)
	started, err := n.amongMounts([]mountedPath{{"/proc", true}, {"/absent", false}}, func() error { return nil })
	if started || err == nil || !strings.Contains(err.Error(), "/absent") {
		t.Error(started, err)
	}
}

// A file system whose server hangs holds up neither the start until it asks for it nor
// any thread of this process, which could not execute the next build then.
func TestAmongMountsOfAServerThatHangs(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	server, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	var closed sync.Once
	defer closed.Do(func() { server.Close() }) // what waits for it fails then
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server.Fd())
	if err := unix.Mount("hangs", dir, "fuse", 0, options); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	for path, want := range map[string]bool{dir: true, filepath.Join(dir, "volume"): false} {
		answered := make(chan bool)
		go func() {
			started, _ := n.amongMounts([]mountedPath{{"/proc", true}, {path, false}}, func() error { return nil })
			answered <- started
		}()
		select {
		case started := <-answered:
			if started != want {
				t.Errorf("started with %s: %t, want %t", path, started, want)
			}
		case <-time.After(time.Minute):
			closed.Do(func() { server.Close() })
			t.Fatalf("%s was waited for: %t", path, <-answered)
		}
		if waits := threadsIn(t, unix.SYS_OPEN_TREE, unix.SYS_OPENAT2); waits != 0 {
			t.Errorf("%d threads wait for %s", waits, path)
		}
	}
}

// threadsIn is how many threads of this process are in one of the calls.
func threadsIn(t *testing.T, calls ...int) (n int) {
	t.Helper()
	threads, err := filepath.Glob("/proc/self/task/*/syscall")
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range threads {
		call, _, _ := strings.Cut(read(thread), " ")
		if number, err := strconv.Atoi(call); err == nil && slices.Contains(calls, number) {
			n++
		}
	}
	return n
}

// A container cannot tell where it was started.
func TestContainerFromFewMounts(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	shareMounts(t, dir)
	volume, inner, file := filepath.Join(dir, "volume"), filepath.Join(dir, "volume", "inner"), filepath.Join(dir, "file")
	err := errors.Join(os.MkdirAll(inner, 0o755), os.WriteFile(file, nil, 0o600), unix.Mount("tmpfs", inner, "tmpfs", 0, ""),
		unix.Mount(n.rootfs, n.rootfs, "", unix.MS_BIND, ""), os.MkdirAll(filepath.Join(n.rootfs, "sys"), 0o755),
		os.Chmod(n.rootfs, 0o777)) // the root of a user namespace makes mountpoints, too
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(inner, unix.MNT_DETACH)
	defer unix.Unmount(n.rootfs, unix.MNT_DETACH)
	for name, change := range map[string]func(*specs.Spec){
		"": func(*specs.Spec) {},
		"with a user namespace": func(s *specs.Spec) {
			s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
			s.Linux.UIDMappings = []specs.LinuxIDMapping{{HostID: 100000, Size: 65536}}
			s.Linux.GIDMappings = s.Linux.UIDMappings
		},
	} {
		all := func(s *specs.Spec) {
			s.Root.Readonly = false
			s.Mounts[1] = specs.Mount{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}}
			s.Mounts = append(
				s.Mounts,
				specs.Mount{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"}},
				specs.Mount{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
				specs.Mount{Destination: "/private", Type: "bind", Source: volume, Options: []string{"rbind", "rprivate", "rw"}},
				specs.Mount{Destination: "/slave", Type: "bind", Source: volume, Options: []string{"rbind", "rslave", "ro"}},
				specs.Mount{Destination: "/file", Type: "bind", Source: file, Options: []string{"bind", "rprivate"}},
			)
			if name == "" {
				s.Linux.RootfsPropagation = "rshared"
				s.Mounts = append(
					s.Mounts, specs.Mount{Destination: "/shared", Type: "bind", Source: volume, Options: []string{"rbind", "rshared"}},
					specs.Mount{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
					specs.Mount{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "relatime", "ro"}},
				)
			}
			change(s)
		}
		t.Run(name, func(t *testing.T) {
			// The same group of the node's mount, another one of what is the container's own.
			mounts := func(start func(*builtinContainer, *libcontainer.Process) error, id string) string {
				return n.mountsOf(t, id, all, start)
			}
			want := mounts(func(c *builtinContainer, p *libcontainer.Process) error { return c.lib.Start(p) }, "among-all")
			got := mounts(func(c *builtinContainer, p *libcontainer.Process) error {
				config := c.lib.Config()
				paths, why := n.mountsOfStart(&config)
				started, err := n.amongMounts(paths, func() error { return c.lib.Start(p) })
				if why != "" || !started {
					return fmt.Errorf("not started among few: %s, %w", why, err)
				}
				return err
			}, "among-few")
			if got != want {
				t.Errorf("among few:\n%s\namong all:\n%s", got, want)
			}
			if name == "" && !strings.Contains(got, " /shared/inner rw,relatime "+groupOf(read("/proc/thread-self/mountinfo"), inner)+" ") {
				t.Errorf("what the node shares is not shared:\n%s", got)
			}
		})
	}
}

// mountsOf starts a container and shows its mounts, but for ids and groups that are not
// the node's.
func (n *node) mountsOf(t *testing.T, id string, change func(*specs.Spec), start func(*builtinContainer, *libcontainer.Process) error) string {
	t.Helper()
	c, init, err := n.make(id, changed(n.spec(id), change), func(c *builtinContainer, p *libcontainer.Process, _ Streams, _ *tree) (*Process, error) {
		if err := start(c, p); err != nil {
			return nil, err
		}
		pid, err := p.Pid()
		if err != nil {
			return nil, err
		}
		return openProcess(pid)
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = init.Signal(syscall.SIGKILL)
		_, _ = syscall.Wait4(init.PID, nil, 0, nil)
		if err := errors.Join(c.Delete(), init.Close()); err != nil {
			t.Error(err)
		}
	}()
	mountinfo := regexp.MustCompile(`(?m)^\d+ \d+ \d+:\d+ `).ReplaceAllString(read(fmt.Sprintf("/proc/%d/mountinfo", init.PID)), "")
	ofNode := read("/proc/thread-self/mountinfo")
	mountinfo = regexp.MustCompile(`(shared|master):\d+`).ReplaceAllStringFunc(mountinfo, func(group string) string {
		kind, number, _ := strings.Cut(group, ":")
		if strings.Contains(ofNode, " shared:"+number+" ") {
			return group
		}
		return kind + ":its own"
	})
	return strings.Join(slices.Sorted(strings.Lines(strings.ReplaceAll(mountinfo, id, "ID"))), "")
}

func changed(spec *specs.Spec, change func(*specs.Spec)) *specs.Spec {
	change(spec)
	return spec
}
