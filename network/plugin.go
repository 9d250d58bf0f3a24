package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	gocni "github.com/containerd/go-cni"
	"golang.org/x/sys/unix"
)

// plugins runs CNI plugins through go-cni, each run with a time limit.
type plugins struct {
	directories []string
	// mark is in the environment of every plugin of this daemon.
	mark string
}

// run is one run of a verb over the plugins of one configuration.
type run struct {
	verb  string
	limit time.Duration
	// config is the configuration list, id the sandbox that it is for; "" for
	// the verbs that are for none (STATUS, GC).
	config []byte
	id     string
}

// run calls do with a go-cni instance of its own for the configuration, so
// that go-cni's lock couples nothing to anything. After the limit, or when the
// context ends, the plugins of this run are killed, whatever they started
// included, and only then does run return.
func (p *plugins) run(ctx context.Context, r run, do func(context.Context, gocni.CNI) error) error {
	cni, err := gocni.New(
		gocni.WithPluginDir(p.directories),
		gocni.WithMinNetworkCount(1),
		gocni.WithInterfacePrefix("eth"),
		gocni.WithConfListBytes(r.config),
	)
	if err != nil {
		return fmt.Errorf("CNI %s: load the configuration: %w", r.verb, err)
	}
	return p.limited(ctx, r, func(ctx context.Context) error { return do(ctx, cni) })
}

func (p *plugins) limited(ctx context.Context, r run, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, r.limit, fmt.Errorf("not done after %v, the plugins were killed", r.limit))
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- do(ctx) }()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = errors.Join(p.killUntil(done, r), context.Cause(ctx))
	}
	if ctx.Err() != nil {
		err = errors.Join(err, p.endRest(ctx, r))
	}
	return p.describe(ctx, r, err)
}

// killUntil kills the processes of a run until it is done.
func (p *plugins) killUntil(done <-chan error, r run) error {
	for {
		killErr := p.each(p.of(r))
		select {
		case err := <-done:
			return errors.Join(err, killErr)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (p *plugins) describe(ctx context.Context, r run, err error) error {
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		err = errors.Join(err, cause)
	}
	return fmt.Errorf("CNI %s: %w", r.verb, explain(err))
}

// of tells the processes of a run. go-cni ends the plugin that it started but
// waits for whoever holds its pipes, such as an IPAM plugin that hangs; that
// one is found by its environment, which plugins hand on to each other.
//
// There is one run at a time for a sandbox, and in it plugins may run others
// with another verb: an ADD that fails has its IPAM plugin DEL.
func (p *plugins) of(r run) func(environment [][]byte) bool {
	return func(environment [][]byte) bool {
		if r.id != "" {
			return has(environment, p.mark) && has(environment, "CNI_CONTAINERID="+r.id)
		}
		return has(environment, p.mark) && has(environment, "CNI_COMMAND="+r.verb)
	}
}

// restLimit is how long a killed process may take to go.
const restLimit = 5 * time.Second

// endRest ends what is left of a run when its pipes are closed: a process that
// was started while the others were killed, and that holds no pipe.
func (p *plugins) endRest(ctx context.Context, r run) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), restLimit)
	defer cancel()
	r.limit = 0
	if err := p.await(ctx, r); err != nil {
		return fmt.Errorf("end the rest of the plugins: %w", err)
	}
	return nil
}

// each shows look the environment of every process, and kills those for which
// it says so.
func (p *plugins) each(look func(environment [][]byte) (kill bool)) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if pid, err := strconv.Atoi(entry.Name()); err == nil && pid != os.Getpid() {
			killIf(pid, look)
		}
	}
	return nil
}

// killIf opens the process before it reads its environment, so that the signal
// cannot go to another one that got the pid meanwhile. One that has ended by
// then needs no signal.
func killIf(pid int, match func([][]byte) bool) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	environment, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err == nil && match(bytes.Split(environment, []byte{0})) {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	}
}

func has(environment [][]byte, variable string) bool {
	for _, v := range environment {
		if string(v) == variable {
			return true
		}
	}
	return false
}
