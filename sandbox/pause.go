package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/oci/pause"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
)

// pauseRoot holds the rootfs that all pause processes share, read-only. It is
// durable because the volatile directory may be mounted noexec.
func (s *Store) pauseRoot() string    { return filepath.Join(s.options.Root, "pause", "rootfs") }
func (s *Store) pauseProgram() string { return filepath.Join(s.pauseRoot(), oci.PauseProgram) }
func (s *Store) emptyDir() string     { return filepath.Join(s.options.Root, "pause", "empty") }

// installPause makes the rootfs of pause, with labels by which pause may be executed
// in any pod.
func (s *Store) installPause() error {
	if err := s.writePause(); err != nil {
		return err
	}
	if err := unix.Access(s.pauseProgram(), unix.X_OK); err != nil {
		return fmt.Errorf("root: %s cannot be executed, so no pod could run: is %s on a file system that is mounted noexec? %w", s.pauseProgram(), s.options.Root, err)
	}
	return s.options.Machine.RelabelForAll(filepath.Join(s.options.Root, "pause"))
}

// writePause writes the embedded pause program into its rootfs, unless the same one
// is there: it may be running.
func (s *Store) writePause() error {
	program, err := pause.Binary()
	if err != nil {
		return err
	}
	for _, dir := range []string{s.pauseRoot(), s.emptyDir(), filepath.Join(s.pauseRoot(), "proc"), filepath.Join(s.pauseRoot(), "dev")} {
		// Processes of user namespaces have to get here, too.
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make the rootfs of pause: %w", err)
		}
	}
	if present, err := os.ReadFile(s.pauseProgram()); err == nil && bytes.Equal(present, program) {
		return hidePause(s.pauseProgram())
	}
	temporary := s.pauseProgram() + ".new"
	err = os.WriteFile(temporary, program, 0o600)
	if err == nil {
		err = hidePause(temporary)
	}
	if err == nil {
		err = os.Rename(temporary, s.pauseProgram())
	}
	if err != nil {
		return fmt.Errorf("install the pause program: %w", err)
	}
	return nil
}

// hidePause makes the program of pause one that can be executed and not read. Pause
// runs without capabilities, and a process that executes a program which it cannot
// read is not dumpable (ptrace(2), "Ptrace access mode checking"). A container of the
// same user could otherwise trace it, in a pid namespace that they share, and end the pod.
func hidePause(path string) error { return os.Chmod(path, 0o111) }

// needsInterfaces reports whether there are parameters of single interfaces,
// or their defaults: they can only be written, and must only take effect, once
// ADD has made the interfaces, so pause is prepared after it.
func needsInterfaces(sysctls map[string]string) bool {
	for name := range sysctls {
		elements := strings.SplitN(oci.SysctlName(name), ".", 4)
		if len(elements) > 2 && elements[0] == "net" && (elements[2] == "conf" || elements[2] == "neigh") {
			return true
		}
	}
	return false
}

// spec is the runtime-spec of this sandbox's pause process.
func (c *creation) spec() (*specs.Spec, error) {
	sandbox := &oci.Sandbox{
		ID:          c.ID,
		Config:      c.config,
		Rootfs:      c.owner.pauseRoot(),
		EmptyDir:    c.owner.emptyDir(),
		CgroupsPath: c.CgroupsPath,
		Machine:     c.owner.options.Machine,
		Defaults:    c.owner.options.Defaults,
		SELinux:     c.labels,
	}
	if !c.hostNetwork() {
		sandbox.NetNS = c.owner.options.Netns.Path(c.ID)
	}
	if oci.UserNamespace(c.config) != nil {
		sandbox.UserNS = c.owner.options.Userns.Path(c.ID)
	}
	return oci.ForSandbox(sandbox)
}

func (s *Store) cgroupsPath(id string, config *runtimeapi.PodSandboxConfig) string {
	parent := config.GetLinux().GetCgroupParent()
	if parent == "" {
		parent = s.options.CgroupParent
	}
	return oci.CgroupsPath(parent, s.options.Node.Mark(), id, s.options.SystemdCgroup)
}

// pauseStarter is a pause process that its supervisor has prepared: init waits
// at the exec barrier until start, or is ended by abort.
type pauseStarter struct {
	owner   *Store
	sandbox *Sandbox
	facts   process.Facts
	started bool
}

// preparePause has the supervisor prepare pause, by a program if one is given.
func (s *Store) preparePause(ctx context.Context, sb *Sandbox, spec *specs.Spec, program []string) (*pauseStarter, error) {
	config, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(s.Dir(sb.ID), "config.json"), config, 0o600); err != nil {
		return nil, err
	}
	supervisor, err := s.options.Supervisors.Ensure(ctx, sb.Group())
	if err != nil {
		return nil, err
	}
	request := &api.CreateRequest{Id: sb.ID, Bundle: s.Dir(sb.ID), Bare: true, Runtime: program}
	made, err := supervisor.Create(ctx, request)
	if err != nil {
		return nil, errors.Join(err, s.deletePause(sb))
	}
	return &pauseStarter{owner: s, sandbox: sb, facts: process.Facts{PID: int(made.GetPid()), StartTime: made.GetStartTime()}}, nil
}

// start starts the prepared pause and returns it once it runs. It asks for the
// supervisor again: the one that has prepared pause may have been replaced by
// one that has adopted it.
func (p *pauseStarter) start(ctx context.Context) (*process.Process, error) {
	// Opened before it is started: from here on it cannot end unseen.
	running, err := process.Open(p.facts)
	if err != nil {
		return nil, fmt.Errorf("the prepared pause process has ended: %w", err)
	}
	if err := p.askToStart(ctx); err != nil {
		return nil, errors.Join(err, running.Close())
	}
	p.started = true
	return running, nil
}

// startTries is how many supervisors may die over one start.
const startTries = 3

func (p *pauseStarter) askToStart(ctx context.Context) error {
	var lost error
	for range startTries {
		supervisor, err := p.owner.options.Supervisors.Ensure(ctx, p.sandbox.Group())
		if err == nil {
			err = supervisor.Start(ctx, p.sandbox.ID)
		}
		if lost != nil && errdefs.IsFailedPrecondition(err) {
			return nil // the one that was lost has started it: it runs
		}
		if !errdefs.IsUnavailable(err) {
			return err
		}
		lost = err
		time.Sleep(lostInterval)
	}
	return lost
}

// lostInterval is what it takes to notice that a connection is gone.
const lostInterval = 20 * time.Millisecond

// abort ends what was prepared and not started. On a nil pauseStarter it does
// nothing.
func (p *pauseStarter) abort() error {
	if p == nil || p.started {
		return nil
	}
	return p.owner.deletePause(p.sandbox)
}

// deletePause has the supervisor kill pause and delete it. Where no supervisor
// serves, only the cgroup is left to remove; one that has begun to serve is asked
// when destroy is called again, a later one finds out at its start. One that hangs
// is killed within the limit, and then none serves.
func (s *Store) deletePause(sb *Sandbox) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*s.limits.Load().Kill)
	defer cancel()
	supervisor, err := s.options.Supervisors.Connect(ctx, sb.Group())
	if sb.unserved = errdefs.IsUnavailable(err); err == nil {
		// One that serves and cannot delete it yet says Unavailable, too.
		err = supervisor.Delete(ctx, sb.ID, true)
		sb.unserved = errors.Is(err, client.ErrLost)
	}
	if errdefs.IsNotFound(err) || sb.unserved {
		return nil
	}
	return err
}
