package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/oci/pause"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
)

// pauseRoot is the read-only rootfs of all pauses. It is durable: the volatile directory may be noexec.
func (s *Store) pauseRoot() string    { return filepath.Join(s.options.Root, "pause", "rootfs") }
func (s *Store) pauseProgram() string { return filepath.Join(s.pauseRoot(), oci.PauseProgram) }
func (s *Store) emptyDir() string     { return filepath.Join(s.options.Root, "pause", "empty") }

// installPause makes the rootfs of pause, with labels that let every pod execute pause.
func (s *Store) installPause() error {
	if err := s.writePause(); err != nil {
		return err
	}
	if err := unix.Access(s.pauseProgram(), unix.X_OK); err != nil {
		return fmt.Errorf("root: %s cannot be executed, so no pod could run: is %s on a file system that is mounted noexec? %w", s.pauseProgram(), s.options.Root, err)
	}
	return s.options.Machine.RelabelForAll(filepath.Join(s.options.Root, "pause"))
}

// writePause writes the pause program, unless it is there and may be running. Nobody may read it: that
// makes pause not dumpable (ptrace(2), "Ptrace access mode checking"). Otherwise a container of the
// same user, in a shared pid namespace, could trace pause and end the pod.
func (s *Store) writePause() error {
	program, err := pause.Binary()
	for _, dir := range []string{s.pauseRoot(), s.emptyDir(), filepath.Join(s.pauseRoot(), "proc"), filepath.Join(s.pauseRoot(), "dev")} {
		err = errors.Join(err, os.MkdirAll(dir, 0o755)) // processes of user namespaces have to get here, too
	}
	if present, readErr := os.ReadFile(s.pauseProgram()); err == nil && (readErr != nil || !bytes.Equal(present, program)) {
		err = state.WriteFile(s.pauseProgram(), program, false)
	}
	if err == nil {
		err = os.Chmod(s.pauseProgram(), 0o111)
	}
	if err != nil {
		return fmt.Errorf("install the pause program: %w", err)
	}
	return nil
}

// needsInterfaces reports whether there are sysctls of interfaces, which can only be written after ADD.
func needsInterfaces(sysctls map[string]string) bool {
	for name := range sysctls {
		elements := strings.SplitN(oci.SysctlName(name), ".", 4)
		if len(elements) > 2 && elements[0] == "net" && (elements[2] == "conf" || elements[2] == "neigh") {
			return true
		}
	}
	return false
}

func (c *creation) spec() (*specs.Spec, error) {
	o := c.owner.options
	return oci.ForSandbox(&oci.Sandbox{
		ID: c.ID, Config: c.config, Rootfs: c.owner.pauseRoot(), EmptyDir: c.owner.emptyDir(), CgroupsPath: c.CgroupsPath,
		Machine: o.Machine, Defaults: o.Defaults, SELinux: c.labels, NetNS: c.owner.NetnsPath(c.Sandbox), UserNS: c.owner.UsernsPath(c.Sandbox),
	})
}

// preparePause has the supervisor make pause, with a runtime if one is given, and bring it to the exec barrier.
func (s *Store) preparePause(ctx context.Context, sb *Sandbox, spec *specs.Spec, runtime []string) (*process.Facts, error) {
	if sysctls := oci.TakeNetworkSysctls(spec); len(sysctls) > 0 {
		var values [][2]string
		for _, one := range sysctls {
			values = append(values, [2]string{one.Path, one.Value})
		}
		if err := s.options.Kernel.SetSysctls(s.NetnsPath(sb), values); err != nil {
			return nil, err
		}
	}
	config, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(s.specFile(sb.ID), config, 0o600); err != nil {
		return nil, err
	}
	supervisor, err := s.options.Supervisors.Ensure(ctx, sb.Supervisor)
	if err != nil {
		return nil, err
	}
	made, err := supervisor.Create(ctx, &api.CreateRequest{Id: sb.ID, Bundle: s.Dir(sb.ID), Bare: true, Runtime: runtime})
	if err != nil {
		return nil, errors.Join(err, s.deletePause(sb))
	}
	return &process.Facts{PID: int(made.GetPid()), StartTime: made.GetStartTime()}, nil
}

func (s *Store) startPause(ctx context.Context, sb *Sandbox, prepared *process.Facts) (Process, error) {
	// With the pidfd we see its end.
	running, err := s.options.Kernel.OpenProcess(*prepared)
	if err != nil {
		return nil, fmt.Errorf("the prepared pause process has ended: %w", err)
	}
	repeated, err := s.options.Supervisors.Call(ctx, sb.Supervisor, func(supervisor *client.Client) error { return supervisor.Start(ctx, sb.ID) })
	if repeated && errdefs.IsFailedPrecondition(err) {
		err = nil // the lost supervisor had started it
	}
	if err != nil {
		return nil, errors.Join(err, running.Close())
	}
	return running, nil
}

// deletePause has the supervisor delete pause. If none serves, the daemon does so once another one has adopted it.
func (s *Store) deletePause(sb *Sandbox) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*s.Limits().Kill)
	defer cancel()
	return s.options.Supervisors.Delete(ctx, sb.Supervisor, sb.ID)
}

// trialLimit bounds a trial of a pause, which usually takes some 100 ms, and is the pause after a trial that failed.
// One that hangs must not run beside the pods for long.
const trialLimit = 5 * time.Second

// Prove starts to try in the background whether pauses can be made. Call it once, when supervisors can be asked.
func (s *Store) Prove() {
	unproven := errors.New("it is not known yet whether pods can be made: the first pause is being started")
	s.unproven.Store(&unproven)
	s.Go(s.prove)
	s.options.Handlers.ProveBy(func(runtime []string) error {
		if err := s.Base.Err(); err != nil {
			return err
		}
		done := make(chan error, 1)
		// In a goroutine that Close waits for.
		s.Go(func() { done <- s.tryPause(trialLimit, runtime) })
		if err := <-done; err != nil {
			return fmt.Errorf("a container on trial could not be made: %w", err)
		}
		return nil
	})
}

// prove makes and removes a pause until that succeeds. The next daemon sweeps what is left.
func (s *Store) prove() {
	tried := sync.OnceFunc(func() { close(s.proof) })
	defer tried()
	for s.Base.Err() == nil {
		err := s.tryPause(s.Limits().Run, nil)
		if err == nil {
			s.unproven.Store(nil)
			return
		}
		err = fmt.Errorf("no pod can be made: a pause did not start, and is tried again: %w", err)
		s.options.Logger.Error("the node is not ready", "err", err)
		s.unproven.Store(&err)
		tried()
		select {
		case <-s.Base.Done():
		case <-time.After(trialLimit):
		}
	}
}

// Ready is nil if this daemon could make a pause, or else says why not.
func (s *Store) Ready() error {
	if err := s.unproven.Load(); err != nil {
		return *err
	}
	return nil
}

// AwaitProof waits up to the limit until a pause and each handler's runtime have been tried.
func (s *Store) AwaitProof(limit time.Duration) {
	ctx, cancel := context.WithTimeout(s.Base, limit)
	defer cancel()
	select {
	case <-s.proof:
	case <-ctx.Done():
	}
	s.options.Handlers.List(ctx)
}

// tryPause makes and removes a pod without a record and without an attachment. A given runtime makes
// it like a container, and does not start it.
func (s *Store) tryPause(limit time.Duration, runtime []string) (err error) {
	ctx, cancel := step.Bound(s.Base, s.Base, limit)
	defer cancel()
	config := &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "proof", Namespace: "minicri", Uid: "proof"},
	}
	record, err := s.newRecord(config, "")
	if err != nil {
		return err
	}
	record.CreatedAt = time.Now().UnixNano()
	c := &creation{Sandbox: newSandbox(record, config), owner: s}
	if err := s.Add(c.Sandbox); err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, s.killPause(c.Sandbox), s.removeProcesses(c.Sandbox), s.options.Netns.Remove(c.ID), s.removeFiles(c.ID))
		s.Forget(c.Sandbox)
	}()
	if err := s.options.Node.Know(cgroup.Path(c.CgroupsPath)); err != nil {
		return err
	}
	if err := c.makeFiles(ctx); err != nil {
		return err
	}
	if err := c.makeNetns(ctx); err != nil {
		return fmt.Errorf("make a network namespace (netns_dir): %w", err)
	}
	spec, err := c.spec()
	if err != nil {
		return err
	}
	maps.DeleteFunc(spec.Linux.Sysctl, func(name, _ string) bool { return needsInterfaces(map[string]string{name: ""}) })
	if len(runtime) > 0 {
		// Runtimes make and need /dev/null.
		spec.Mounts = slices.DeleteFunc(spec.Mounts, func(m specs.Mount) bool { return m.Destination == "/dev" })
		spec.Mounts = append(spec.Mounts, specs.Mount{Destination: "/dev", Type: "tmpfs", Source: "tmpfs"})
	}
	prepared, err := s.preparePause(ctx, c.Sandbox, spec, runtime)
	if err == nil && len(runtime) == 0 {
		c.pause, err = s.startPause(ctx, c.Sandbox, prepared)
	}
	return err
}
