package sandbox

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/oci/pause"
	"github.com/minicri/minicri/shim/client"
)

// pauseRoot holds the rootfs that all pause processes share, read-only. It is
// durable because the volatile directory may be mounted noexec.
func (s *Store) pauseRoot() string    { return filepath.Join(s.options.Root, "pause", "rootfs") }
func (s *Store) pauseProgram() string { return filepath.Join(s.pauseRoot(), oci.PauseProgram) }
func (s *Store) emptyDir() string     { return filepath.Join(s.options.Root, "pause", "empty") }

// installPause writes the embedded pause program into its rootfs, unless the
// same one is there: it may be running.
func (s *Store) installPause() error {
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
		return nil
	}
	temporary := s.pauseProgram() + ".new"
	if err := os.WriteFile(temporary, program, 0o755); err != nil {
		return fmt.Errorf("install the pause program: %w", err)
	}
	if err := os.Rename(temporary, s.pauseProgram()); err != nil {
		return fmt.Errorf("install the pause program: %w", err)
	}
	return nil
}

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

// pauseStarter is the short-lived shim that has prepared a pause process and
// waits for the word to release it. When its stdin closes without the word,
// because we gave up or were killed, it takes the process back.
//
//	daemon                      shim
//	  |---- start, config.json --->|
//	  |                            | container made, init at the barrier
//	  |<--- {"pid", "start_time"} -|
//	  |---- "start\n" ------------>|
//	  |                            | init becomes pause
//	  |<--- {"started": true} -----| exits
type pauseStarter struct {
	facts   process.Facts
	command *exec.Cmd
	word    io.WriteCloser
	answers *json.Decoder
	stderr  *bytes.Buffer
	stop    context.CancelFunc
	limit   time.Duration
}

// answer is one line of the shim.
type answer struct {
	process.Facts
	Started bool   `json:"started"`
	Error   string `json:"error"`
}

// preparePause starts the shim and waits until pause is prepared.
func (s *Store) preparePause(ctx context.Context, id string, spec *specs.Spec) (*pauseStarter, error) {
	config, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(s.Dir(id), "config.json"), config, 0o600); err != nil {
		return nil, err
	}
	p := &pauseStarter{limit: s.options.Limits.Kill, stderr: &bytes.Buffer{}}
	ctx, p.stop = context.WithCancel(ctx)
	p.command = exec.CommandContext(ctx, s.options.Shim, s.pauseArgs(id)...)
	p.command.Args[0] = client.Name
	// One processor: the Go runtimes of shim and init start faster with it.
	p.command.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "GOMAXPROCS=1"}
	p.command.Stderr = p.stderr
	p.command.WaitDelay = s.options.Limits.Kill
	// Closing its stdin is how the shim is told to clean up.
	p.command.Cancel = func() error { return p.word.Close() }
	if err := p.start(); err != nil {
		p.stop()
		return nil, err
	}
	first, err := p.next()
	if err != nil {
		return nil, errors.Join(err, p.abort())
	}
	p.facts = first.Facts
	return p, nil
}

func (s *Store) pauseArgs(id string) []string {
	args := []string{"pause", "--root", s.runtimeRoot(), "--id", id, "--bundle", s.Dir(id)}
	if s.options.SystemdCgroup {
		args = append(args, "--systemd-cgroup")
	}
	return args
}

func (p *pauseStarter) start() error {
	var err error
	if p.word, err = p.command.StdinPipe(); err != nil {
		return err
	}
	output, err := p.command.StdoutPipe()
	if err != nil {
		return err
	}
	p.answers = json.NewDecoder(bufio.NewReader(output))
	if err := p.command.Start(); err != nil {
		return fmt.Errorf("start the shim: %w", err)
	}
	return nil
}

func (p *pauseStarter) next() (answer, error) {
	var a answer
	if err := p.answers.Decode(&a); err != nil {
		return a, fmt.Errorf("the shim ended without an answer: %w%s", err, p.said())
	}
	if a.Error != "" {
		return a, fmt.Errorf("the shim: %s%s", a.Error, p.said())
	}
	return a, nil
}

// said is the end of what the shim wrote to stderr. It may still be writing,
// so it is asked only after its stdout has ended or an error came.
func (p *pauseStarter) said() string {
	p.stop()
	_ = p.command.Wait()
	text := strings.TrimSpace(p.stderr.String())
	if text == "" {
		return ""
	}
	const most = 1024
	return " (" + text[max(0, len(text)-most):] + ")"
}

// release lets pause run, and returns it once it does. The shim still has to
// be waited for, with abort.
func (p *pauseStarter) release() (*process.Process, error) {
	// Opened before it is released: from here on it cannot end unseen.
	running, err := process.Open(p.facts)
	if err != nil {
		return nil, fmt.Errorf("the prepared pause process has ended: %w", err)
	}
	if _, err := io.WriteString(p.word, "start\n"); err != nil {
		return nil, errors.Join(fmt.Errorf("give the shim the word: %w", err), running.Close())
	}
	last, err := p.next()
	if err == nil && !last.Started {
		err = errors.New("the shim did not start pause")
	}
	if err != nil {
		return nil, errors.Join(err, running.Close())
	}
	return running, nil
}

// abort waits for the end of the shim and, unless it has released pause, makes
// it take back what it prepared. On a starter that never was, or has ended,
// there is nothing to do.
func (p *pauseStarter) abort() error {
	if p == nil || p.command.ProcessState != nil {
		return nil
	}
	p.stop()
	var exit *exec.ExitError
	err := p.command.Wait()
	// ECHILD: it ended long ago and was reaped as nobody's.
	if err != nil && !errors.As(err, &exit) && !errors.Is(err, context.Canceled) && !errors.Is(err, unix.ECHILD) {
		return fmt.Errorf("end the shim: %w", err)
	}
	return nil
}
