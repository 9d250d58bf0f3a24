package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/step/failpoint"
	"github.com/minicri/minicri/supervisor/api"
)

// StartOptions says how to start a supervisor.
type StartOptions struct {
	Binary        string // path of minicri-shim
	Build         string // what names it: Program.Build
	Version       string // of this daemon
	ForOthers     string // where a supervisor finds the program for its starters: Program.ForOthers
	Dir           string // the directory of the supervisor, made if absent
	SystemdCgroup bool   // cgroupsPath of its containers is slice:prefix:name
}

const longestSocket = 107 // sockaddr_un (unix(7)) holds so many characters and a NUL

// StartSupervisor starts a supervisor, which outlives the daemon, and returns when it serves. It logs to the file Log of
// Dir. StartSupervisor fails while another process has Dir locked.
func StartSupervisor(ctx context.Context, options StartOptions) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	if socket := filepath.Join(options.Dir, api.StreamSocket); len(socket) > longestSocket {
		return fmt.Errorf("start the supervisor: %s is longer than the %d characters that a unix socket can have, choose a shorter directory: %w", socket, longestSocket, errdefs.ErrInvalidArgument)
	}
	if err := os.MkdirAll(options.Dir, 0o700); err != nil {
		return fmt.Errorf("start the supervisor: %w", err)
	}
	if err := spawn(ctx, options); err != nil {
		return fmt.Errorf("start the supervisor of %s (its log is %s there): %w", options.Dir, Log, err)
	}
	return nil
}

func spawn(ctx context.Context, options StartOptions) error {
	log, err := os.OpenFile(filepath.Join(options.Dir, Log), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	ready, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	cmd := exec.Command(options.Binary, "serve", "--dir", options.Dir, "--build", options.Build, "--daemon-version", options.Version, "--ready-fd", "3")
	if options.SystemdCgroup {
		cmd.Args = append(cmd.Args, "--systemd-cgroup")
	}
	cmd.Args[0] = Name
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Dir = "/"
	// libcontainer hands GOMAXPROCS=1 on to its inits, which start faster with it.
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "GOMAXPROCS=1"}, failpoint.Environ()...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	_ = theirs.Close()
	if err != nil {
		return err
	}
	if err := awaitReady(ctx, ready, cmd.Process); err != nil {
		go func() { _ = cmd.Wait() }() // it ends, or is killed
		return err
	}
	// It outlives us, or is reaped as an orphan: waiting for a child would hold one descriptor more.
	return cmd.Process.Release()
}

// awaitReady reads what the supervisor says; one that ends says nothing.
func awaitReady(ctx context.Context, ready *os.File, supervisor *os.Process) error {
	defer context.AfterFunc(ctx, func() { _ = ready.SetReadDeadline(time.Now()) })()
	word, err := io.ReadAll(ready)
	switch said := string(word); {
	case err != nil:
		_ = supervisor.Kill()
		return fmt.Errorf("it does not serve: %w: %w", errdefs.ErrUnavailable, err)
	case said == api.Ready:
		return nil
	case said == "":
		return fmt.Errorf("it ended and did not say why: %w", errdefs.ErrUnavailable)
	default:
		return fmt.Errorf("%s: %w", said, errdefs.ErrUnavailable)
	}
}

// serving connects to a group's supervisor, or starts it; the lock is held. One that has its directory's lock and does not
// answer is about to end, within endingLimit, or cannot be reached, and is ended. After a failed start serving
// refuses another one for a pause, which doubles each time.
func (s *Set) serving(ctx context.Context, g *group) (*Client, error) {
	for began := time.Now(); ; time.Sleep(RetryPause) {
		supervisor, err := g.connect(ctx, s)
		if !errdefs.IsUnavailable(err) || ctx.Err() != nil {
			return supervisor, err
		}
		holder, err := s.options.Host.LockHolder(g.dir)
		if err == nil && holder != 0 && time.Since(began) < endingLimit {
			continue
		}
		if left := time.Until(g.notBefore); left > 0 {
			return nil, fmt.Errorf("the supervisor is started again in %v, its last start failed: %w: %w", left.Round(time.Millisecond), errdefs.ErrUnavailable, g.failed)
		}
		if err == nil && holder != 0 {
			err = s.options.Host.EndLockHolder(g.dir)
		}
		if err == nil {
			err = s.Known(filepath.Base(g.dir))
		}
		if err == nil {
			options := s.options.Start
			options.Dir = g.dir
			err = s.options.Host.Start(context.WithoutCancel(ctx), options) // others wait for it, too
		}
		if err == nil {
			if supervisor, err = g.connect(ctx, s); err != nil && ctx.Err() != nil {
				return nil, err // it serves, and the caller has left
			}
		}
		if err == nil {
			g.pause = 0
			return supervisor, nil
		}
		g.pause = min(max(2*g.pause, minBack), maxBack)
		g.failed, g.notBefore = err, time.Now().Add(g.pause)
		s.options.Logger.Error("a supervisor does not start: it is tried again", "dir", g.dir, "after", g.pause, "err", err)
		return nil, err
	}
}

// endHolder ends the supervisor that has a lock and does not answer. It ends no other process.
func endHolder(dir string) error {
	pid, err := api.LockHolder(dir)
	if err != nil || pid == 0 {
		return err
	}
	holder, err := process.Find(pid)
	if errors.Is(err, process.ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer holder.Close()
	if again, err := api.LockHolder(dir); err != nil || again != pid {
		return err // the pid may have been given to another process before it was opened
	}
	if !process.Doomed(pid) {
		content, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // "" if it has ended
		line := strings.Split(strings.TrimSuffix(string(content), "\x00"), "\x00")
		if len(line) < 2 || line[0] != Name || line[1] != "serve" || !slices.Contains(line, dir) {
			return fmt.Errorf("%s/%s is locked by process %d (%s), which is no supervisor: end that process: %w", dir, api.LockFile, pid, strings.Join(line, " "), errdefs.ErrUnavailable)
		}
		err = holder.Kill(process.KillLimit)
	}
	if process.Doomed(pid) { // its lock stays with the file that it has open; the daemon starts one successor at a time
		return os.Remove(filepath.Join(dir, api.LockFile))
	}
	if err != nil {
		return fmt.Errorf("end the supervisor that has %s locked and does not answer: %w: %w", dir, errdefs.ErrUnavailable, err)
	}
	return nil
}

// Log is the file that a supervisor logs to, in its directory.
const Log = "shim.log"

const (
	maxPassedOn = 64 << 10  // bytes of a log that are passed on at a time
	keptLog     = 128 << 10 // bytes that stay in the file after they are passed on
	// passedOn is the file's attribute that tells the next daemon how much was passed on.
	passedOn = "trusted.minicri.passed"
)

// passLogsOn copies what supervisors log to the daemon's log. Without a daemon it stays in the file.
func (s *Set) passLogsOn() {
	passed := make(map[string]int64) // by group, up to where its log was passed on
	for {
		groups, err := s.Groups()
		if err == nil { // else they are there the next time
			maps.DeleteFunc(passed, func(name string, _ int64) bool { return !slices.Contains(groups, name) })
		}
		for _, name := range groups {
			if err := s.passLogOn(name, passed); err != nil && !errors.Is(err, fs.ErrNotExist) {
				s.options.Logger.Debug("the log of a supervisor cannot be read", "build", name, "err", err)
			}
		}
		select {
		case <-s.base.Done():
			return
		case <-time.After(logPeriod):
		}
	}
}

// TailOfLog is the end of a supervisor's log.
func TailOfLog(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	tail := make([]byte, min(size, 2*keptLog))
	n, _ := file.ReadAt(tail, size-int64(len(tail))) // to its end
	return bytes.TrimLeft(tail[:n], "\x00"), nil     // of the hole
}

func (s *Set) passLogOn(name string, passed map[string]int64) error {
	file, err := os.OpenFile(filepath.Join(s.Dir(name), Log), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	from, known := passed[name]
	if !known {
		from = passedBefore(file)
	}
	lines := make([]byte, maxPassedOn)
	for {
		n, _ := file.ReadAt(lines, from) // to its end
		whole := bytes.LastIndexByte(lines[:n], '\n') + 1
		if whole == 0 && n == maxPassedOn {
			whole = n // one long line
		}
		passed[name] = from + int64(whole)
		if whole == 0 {
			return nil
		}
		for line := range strings.Lines(string(lines[:whole])) {
			level, text := parseLine(strings.TrimSpace(line))
			s.options.Logger.Log(context.Background(), level, "supervisor", "build", name, "said", text)
		}
		from += int64(whole)
		// The disk is released but for the end: cutting the file while the supervisor appends would lose a
		// line. Without the note the next daemon passes on again what the file has.
		if over := (from - keptLog) &^ 4095; over > 0 {
			_ = unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, over) // else the file keeps its blocks
		}
		_ = unix.Fsetxattr(int(file.Fd()), passedOn, strconv.AppendInt(nil, from, 10), 0)
	}
}

// passedBefore returns how much of a log an earlier daemon has passed on. Where the attribute cannot be set, it returns
// the beginning of what the file still has.
func passedBefore(file *os.File) int64 {
	number := make([]byte, 32)
	n, _ := unix.Fgetxattr(int(file.Fd()), passedOn, number)
	from, _ := strconv.ParseInt(string(number[:max(n, 0)]), 10, 64) // 0 without one
	if data, err := file.Seek(from, unix.SEEK_DATA); err == nil {
		return data
	}
	return from // the end
}

// parseLine takes time and level off a line of log/slog. A level in small letters is a library's, which calls a client
// that has gone an error: we log it for debugging. A line without a level is the end of a failing program.
func parseLine(line string) (level slog.Level, text string) {
	_, rest, _ := strings.Cut(line, " level=")
	word, text, _ := strings.Cut(rest, " ")
	switch err := level.UnmarshalText([]byte(word)); {
	case err != nil:
		return slog.LevelError, line
	case word != strings.ToUpper(word):
		return slog.LevelDebug, text
	}
	return level, text
}
