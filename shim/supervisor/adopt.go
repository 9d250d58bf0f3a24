package supervisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/system"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/stdio/crilog"
)

// adoptAll takes over what a shim that died has left. A record that cannot be
// used is reported and set aside; it never keeps the others from being served.
func (s *Supervisor) adoptAll() error {
	records, err := filepath.Glob(filepath.Join(s.dir, "records", "*.json"))
	if err != nil {
		return err
	}
	for _, path := range records {
		if err := s.adopt(path); err != nil {
			s.log.Error("a container cannot be adopted, its record is set aside", "record", path, "error", err)
			_ = os.Rename(path, strings.TrimSuffix(path, ".json")+".bad")
		}
	}
	return nil
}

func (s *Supervisor) adopt(path string) error {
	c := &container{sup: s, adopted: true, exited: make(chan struct{}), execs: map[string]*exec{}, killed: true}
	if err := readJSON(path, &c.record); err != nil {
		return err
	}
	id := c.record.ID
	lib, err := libcontainer.Load(filepath.Join(s.dir, "containers"), id)
	if err != nil && !errors.Is(err, libcontainer.ErrNotExist) {
		return fmt.Errorf("load container %s: %w", id, err)
	}
	c.lib = lib
	if err := s.reserve(c); err != nil {
		return err
	}
	if err := readJSON(filepath.Join(s.dir, api.ExitDir, id+".json"), &c.exit); err == nil && c.exit != nil {
		close(c.exited)
		return nil
	}
	c.exit = nil
	c.adoptStreams()
	pidfd, err := openSame(c.record.PID, c.record.StartTime)
	if err != nil {
		c.finish(0, false)
		return nil
	}
	if c.init, err = os.FindProcess(c.record.PID); err != nil {
		return err
	}
	c.killed = false
	c.oom.kills, _ = readOOMKills(c.record.Cgroups)
	c.watchOOM()
	go c.awaitAdopted(pidfd)
	return nil
}

// adoptStreams goes on reading the fifos. A terminal is lost with its shim.
func (c *container) adoptStreams() {
	c.io = &stdio{fans: map[string]*fanout{}}
	if c.record.Terminal {
		return
	}
	if c.record.LogPath != "" {
		var err error
		if c.io.log, err = crilog.Open(c.record.LogPath); err != nil {
			c.sup.log.Error("the log of an adopted container cannot be opened", "container", c.record.ID, "error", err)
		}
	}
	for _, stream := range []string{api.Stdout, api.Stderr} {
		if err := c.io.readFifo(c.sup.dir, c.record.ID, stream); err != nil {
			c.sup.log.Error("a stream of an adopted container is lost", "container", c.record.ID, "stream", stream, "error", err)
		}
	}
	c.io.run()
}

// openSame opens a process by pid and start time: pids are reused.
func openSame(pid int, startTime uint64) (pidfd int, err error) {
	if pidfd, err = unix.PidfdOpen(pid, 0); err != nil {
		return -1, err
	}
	stat, err := system.Stat(pid)
	if err != nil || stat.StartTime != startTime {
		_ = unix.Close(pidfd)
		return -1, fmt.Errorf("process %d is not the one of the record", pid)
	}
	return pidfd, nil
}

// awaitAdopted waits for an init that is not our child.
func (c *container) awaitAdopted(pidfd int) {
	defer unix.Close(pidfd)
	poll := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(poll, -1); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	c.finish(exitInfo(pidfd))
}

// pidfdInfo is struct pidfd_info of linux/pidfd.h, version 0.
type pidfdInfo struct {
	mask     uint64
	cgroupid uint64
	ids      [11]uint32
	exitCode int32
}

const (
	pidfdGetInfo  = 0xC040FF0B // _IOWR(0xFF, 11, struct pidfd_info)
	pidfdInfoExit = 1 << 3
	// exitInfoPatience is for the new parent to reap: only then does the kernel
	// tell (Linux 6.15).
	exitInfoPatience = 2500 * time.Millisecond
)

// exitInfo asks the kernel for the exit status of an ended process that is not
// our child. Older kernels do not tell.
func exitInfo(pidfd int) (status syscall.WaitStatus, known bool) {
	for deadline := time.Now().Add(exitInfoPatience); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		info := pidfdInfo{mask: pidfdInfoExit}
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(pidfd), pidfdGetInfo, uintptr(unsafe.Pointer(&info)))
		if errno == 0 && info.mask&pidfdInfoExit != 0 {
			return syscall.WaitStatus(info.exitCode), true
		}
		if errno == unix.ENOTTY || errno == unix.EINVAL {
			return 0, false
		}
	}
	return 0, false
}
