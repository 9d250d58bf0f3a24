//go:build vm

// Package um holds the guest that tests run in, a machine with cgroup v2, systemd and
// AppArmor in a process: these tests boot it by run.
package um

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// What is written to each of the two streams arrives there whole, and so does the status.
func TestOutputAndStatus(t *testing.T) {
	var stdout, stderr bytes.Buffer
	command := exec.Command("./run", "sh", "-c", `seq 1 300000; echo "$1" >&2; exit 7`, "sh", `it's "one" word`)
	command.Stdout, command.Stderr = &stdout, &stderr
	err := command.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 7 {
		t.Errorf("the status is %v, want 7", err)
	}
	want, err := exec.Command("seq", "1", "300000").Output()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(stdout.Bytes(), want) {
		t.Errorf("%d bytes on stdout, want %d; they begin with %.40q", stdout.Len(), len(want), stdout.Bytes())
	}
	if !strings.HasSuffix(stderr.String(), "it's \"one\" word\n") {
		t.Errorf("on stderr: %q", stderr.String())
	}
}

// It is the machine that users have, and it says which kernel it runs.
func TestMachine(t *testing.T) {
	script := `stat -fc %T /sys/fs/cgroup; ps -o comm= 1; cat /sys/module/apparmor/parameters/enabled
		findmnt -no PROPAGATION /; systemctl --failed --no-legend; uname -r >&2; cat /sys/fs/cgroup/cgroup.controllers >&2`
	command := exec.Command("./run", "sh", "-c", script)
	kernel := &bytes.Buffer{}
	command.Stderr = kernel
	output, err := command.Output()
	if want := "cgroup2fs\nsystemd\nY\nshared\n"; err != nil || string(output) != want {
		t.Errorf("%v: the guest is %q, want %q; %s", err, output, want, kernel)
	}
	t.Logf("the kernel is %s", kernel)
}

// Where no kernel can be built the guest has Debian's, if that runs on the processor, and
// all hear of it; where it does not, there is none. make test shows which it was.
func TestKernelWithoutSource(t *testing.T) {
	bin := t.TempDir()
	without := "#!/bin/sh\ncase \"$*\" in *linux-source*) exit 100 ;; esac\nexec /usr/bin/apt-get \"$@\"\n"
	if err := os.WriteFile(filepath.Join(bin, "apt-get"), []byte(without), 0o755); err != nil {
		t.Fatal(err)
	}
	linux := exec.Command("./linux")
	linux.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "MINICRI_UM="+t.TempDir())
	said := &bytes.Buffer{}
	linux.Stderr = said
	kernel, err := linux.Output()
	if strings.Contains(said.String(), "um: NO KERNEL: ") && strings.Contains(said.String(), "does not run on this processor") {
		if err == nil || len(kernel) > 0 {
			t.Errorf("there is no kernel, and it ends with %v and prints %q", err, kernel)
		}
		fmt.Println("um: TestKernelWithoutSource has booted no guest: Debian's kernel does not run on this processor")
		return
	}
	if err != nil || !strings.Contains(said.String(), "NO KERNEL OF OUR OWN") {
		t.Fatalf("%v: %s", err, said)
	}
	command := exec.Command("./run", "sh", "-c", "uname -r; cat /sys/module/apparmor/parameters/enabled; iptables -w -S INPUT && stat -fc %T /sys/fs/cgroup")
	command.Env = append(os.Environ(), "MINICRI_UM_KERNEL="+strings.TrimSpace(string(kernel)))
	output, err := command.CombinedOutput()
	if err != nil || !strings.HasPrefix(string(output), "6.") || !strings.HasSuffix(string(output), "\nY\n-P INPUT ACCEPT\ncgroup2fs\n") {
		t.Errorf("%v: the guest says %q", err, output)
	}
}

// A guest ends with run, also when that is killed, and leaves nothing behind.
func TestKilled(t *testing.T) {
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(signal.String(), func(t *testing.T) {
			before := files(t)
			command := exec.Command("./run", "sh", "-c", "echo up; exec sleep infinity")
			stdout, err := command.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := command.Start(); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(stdout, make([]byte, len("up\n"))); err != nil {
				t.Fatal(errors.Join(err, command.Wait()))
			}
			guest := descendants(t, command.Process.Pid)
			if len(guest) < 3 {
				t.Errorf("the guest is %v, want at least run, a kernel and a process", guest)
			}
			if err := command.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			_ = command.Wait() // it was killed
			for deadline := time.Now().Add(time.Minute); slices.ContainsFunc(guest, exists); time.Sleep(50 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("of processes %v some still run", guest)
				}
			}
			if after := files(t); !slices.Equal(before, after) {
				t.Errorf("in /dev/shm: %v, before %v", after, before)
			}
		})
	}
}

func files(t *testing.T) []string {
	t.Helper()
	all, err := filepath.Glob("/dev/shm/*")
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// descendants are the processes below one, whatever their namespaces.
func descendants(t *testing.T, pid int) (below []int) {
	t.Helper()
	lists, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range lists {
		children, err := os.ReadFile(list)
		if err != nil {
			continue // the thread has ended
		}
		for _, field := range strings.Fields(string(children)) {
			child, err := strconv.Atoi(field)
			if err != nil {
				t.Fatal(err)
			}
			below = append(append(below, child), descendants(t, child)...)
		}
	}
	return below
}

func exists(pid int) bool {
	_, err := os.Stat("/proc/" + strconv.Itoa(pid))
	return err == nil
}
