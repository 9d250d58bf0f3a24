package client

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
)

// ErrUnknownBuild (FailedPrecondition) says that this build does not know a supervisor's protocol or files.
var ErrUnknownBuild = fmt.Errorf("a daemon of that build, or of one that knows both, can serve its pods: %w", errdefs.ErrFailedPrecondition)

// Own is the group of new pods: that of this build.
func (s *Set) Own() string { return s.options.Start.Build }

// Known returns ErrUnknownBuild if this build cannot serve, or succeed, a group's supervisor.
func (s *Set) Known(name string) error {
	about, err := api.ReadAbout(s.Dir(name))
	if err != nil {
		return err
	}
	return known(s.Dir(name), about)
}

func spoken(about *api.About) bool {
	return about.Protocol >= api.OldestProtocol && about.Protocol <= api.Protocol
}

func known(dir string, about *api.About) error {
	if about == nil || spoken(about) && about.Records <= api.RecordVersion {
		return nil
	}
	what, version, knows := "its protocol has", about.Protocol, uint32(api.Protocol)
	if spoken(about) {
		if holder, err := api.LockHolder(dir); err != nil || holder != 0 {
			return err // it lives, and reads its own records
		}
		what, version, knows = "it has died, and its records have", about.Records, api.RecordVersion
	}
	return fmt.Errorf("the supervisor of build %s, version %s: %s version %d, and this build knows version %d: %w", filepath.Base(dir), about.Version, what, version, knows, ErrUnknownBuild)
}

// Supervisor describes a supervisor of the node for people.
type Supervisor struct {
	api.About
	Group   string `json:"group"` // the build that its pods were made with
	Pods    int    `json:"pods"`
	Problem string `json:"problem,omitempty"` // why its pods cannot be served; "" if they can
}

// Older returns the supervisors below dir of other builds than build. Pods are counted by group.
func Older(dir, build string, pods map[string]int) (older []Supervisor, err error) {
	groups, err := groupsIn(dir)
	for _, group := range groups {
		about, aboutErr := api.ReadAbout(filepath.Join(dir, group))
		if group == build || about == nil && aboutErr == nil {
			continue
		}
		one := Supervisor{Group: group, Pods: pods[group]}
		if about != nil {
			one.About = *about
		}
		if problem := errors.Join(aboutErr, known(filepath.Join(dir, group), about)); problem != nil {
			one.Problem = problem.Error()
		}
		older = append(older, one)
	}
	return older, err
}

// Older returns the supervisors of other builds than this one's.
func (s *Set) Older(pods map[string]int) ([]Supervisor, error) {
	return Older(s.options.Dir, s.Own(), pods)
}

// Ended reports whether a group is another build's and has no containers and no pauses.
func (s *Set) Ended(name string) bool {
	records, err := os.ReadDir(filepath.Join(s.Dir(name), api.RecordDir))
	return name != s.Own() && (errors.Is(err, os.ErrNotExist) || err == nil && len(records) == 0)
}

// End ends the supervisor of another build without pods, and removes its directory. Others serve on.
func (s *Set) End(ctx context.Context, name string) error {
	if !s.Ended(name) || s.Known(name) != nil {
		return nil
	}
	g := s.of(name)
	if g.lock.Acquire(ctx, 1) != nil {
		return fmt.Errorf("end the supervisor of build %s: %w", name, context.Cause(ctx))
	}
	defer g.lock.Release(1)
	supervisor, err := g.connect(ctx, s)
	if err == nil {
		err = errors.Join(supervisor.Shutdown(ctx), supervisor.Close())
		g.client = nil
	}
	switch {
	case errdefs.IsFailedPrecondition(err): // it has some again
		return nil
	case err == nil || errdefs.IsUnavailable(err):
		err = os.RemoveAll(g.dir)
	}
	if err != nil {
		return fmt.Errorf("end the supervisor of build %s: %w", name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.groups, name)
	return nil
}

// Program is the shim's program, sealed in memory: no process can change it, and no container reaches its file through
// /proc (CVE-2019-5736), for which libcontainer would make a copy, or a mount, for every process. Supervisors also
// stay at the daemon's version while the file is being replaced.
type Program struct {
	Path   string // where to execute it, from this process only
	Build  string // names it by its content
	sealed *os.File
}

// OpenProgram reads the program into memory, once for all supervisors.
func OpenProgram(path string) (*Program, error) {
	var sealed *os.File
	build, err := read(path, func(program io.Reader) (err error) {
		sealed, err = process.Seal(Name, program)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("copy %s into memory: %w", path, err)
	}
	return &Program{Path: "/proc/self/fd/" + strconv.Itoa(int(sealed.Fd())), Build: build, sealed: sealed}, nil
}

// BuildOf names the program in a file, as Program.Build does.
func BuildOf(path string) (string, error) {
	return read(path, func(program io.Reader) error {
		_, err := io.Copy(io.Discard, program)
		return err
	})
}

// read has a program read to its end. The beginning of its digest is enough to distinguish builds.
func read(path string, all func(program io.Reader) error) (build string, err error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	digest := sha256.New()
	if err := all(io.TeeReader(file, digest)); err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	return hex.EncodeToString(digest.Sum(nil))[:16], nil
}

// ForOthers is where other processes find it, as long as this one runs.
func (p *Program) ForOthers() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.sealed.Fd())
}

// Name is what the program calls itself: its path says nothing.
const Name = "minicri-shim"

// Close releases the memory once no supervisor runs in it.
func (p *Program) Close() error { return p.sealed.Close() }
