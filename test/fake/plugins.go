package fake

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/minicri/minicri/network/runner"
)

// Chain are the plugins of the network, whose first one has the addresses.
var Chain = []string{"first", "middle", "last"}

// Conflist is the configuration of the network; %s are more keys of the first plugin, as `, "key": "value"`.
const Conflist = `{"cniVersion": "1.0.0", "name": "net",
	"plugins": [{"type": "first"%s}, {"type": "middle"}, {"type": "last"}]}`

// Call is one run of a plugin. NoNetns means that CNI_NETNS was empty.
type Call struct {
	Plugin, Verb, ID, Args, Stdin string
	NoNetns                       bool
}

// runs is network.Runs.
type runs struct {
	*runner.Runner
	d *Daemon
}

func (r runs) Begin(request runner.Request) (*runner.Run, error) {
	r.d.live()
	return r.Runner.Begin(request)
}

// populatedFile is in the cgroup of a run while a plugin runs.
const populatedFile = "cgroup.events"

type answer struct {
	text string
	err  error
}

// exec is runner.Runner.Exec. The plugin goes on without the daemon.
func (d *Daemon) exec(ctx context.Context, run *runner.Run, path string, stdin []byte, environment []string) ([]byte,
	error,
) {
	d.live()
	env := make(map[string]string)
	for _, variable := range environment {
		name, value, _ := strings.Cut(variable, "=")
		env[name] = value
	}
	populated := filepath.Join(run.Group.Dir, populatedFile) // a process is in its cgroup when the start returns
	if err := os.WriteFile(populated, []byte("populated 1\n"), 0o600); err != nil {
		return nil, err
	}
	c := Call{
		filepath.Base(path), env["CNI_COMMAND"], env["CNI_CONTAINERID"], env["CNI_ARGS"], string(stdin),
		env["CNI_NETNS"] == "",
	}
	done := make(chan answer, 1)
	go func() { done <- d.plugin(ctx, run.Group.Dir, c) }()
	select {
	case a := <-done:
		d.live()
		return []byte(a.text), a.err
	case <-ctx.Done():
		d.live()
		return nil, ctx.Err()
	}
}

// orphanPoll is how often a plugin whose daemon is dead looks whether the next daemon has killed it by a file.
const orphanPoll = 10 * time.Millisecond

// plugin is the process of a plugin, in the cgroup of a run. It ends with ctx if its daemon lives.
func (d *Daemon) plugin(ctx context.Context, group string, c Call) answer {
	populated, killed := filepath.Join(group, populatedFile), filepath.Join(group, "cgroup.kill")
	defer func() {
		_ = errors.Join(os.RemoveAll(killed), os.Remove(populated))
		// A kill that saw the plugin writes its file at this moment, and looks again a millisecond later.
		time.AfterFunc(time.Millisecond/2, func() { _ = os.RemoveAll(killed) })
	}()
	d.mu.Lock()
	d.calls = append(d.calls, c)
	booted := d.booted
	d.mu.Unlock()
	reached := make(chan error, 1)
	go func() { reached <- d.reach(c.Plugin + " " + c.Verb) }()
	var err error
	died, ended := d.dead.Done(), ctx.Done()
	for waiting := true; waiting; {
		var orphaned <-chan time.Time
		if d.dead.Err() != nil {
			died, ended, orphaned = nil, nil, time.After(orphanPoll)
		}
		select {
		case err = <-reached:
			waiting = false
		case <-died:
		case <-orphaned:
		case <-ended:
			if d.dead.Err() == nil {
				return answer{err: errors.New("killed")}
			}
		case <-booted.Done():
		}
		if _, notKilled := os.Lstat(killed); notKilled == nil || booted.Err() != nil {
			return answer{err: errors.New("killed")}
		}
	}
	if err != nil && c.Verb == "ADD" {
		return answer{text: fmt.Sprintf(`{"cniVersion": "1.0.0", "code": 100, "msg": %q}`, err)}
	}
	if err != nil {
		return answer{err: err}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case c.Plugin == Chain[0] && c.Verb == "ADD":
		d.note("address", c.ID)
	case c.Plugin == Chain[0] && c.Verb == "DEL":
		d.forget("address", c.ID)
	}
	return answer{text: `{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "pod"}],
		"ips": [{"address": "10.1.0.2/24", "interface": 0}]}`}
}

// Calls returns the runs of the plugins by id, in order: "ADD first, ADD middle, ".
func (n *Node) Calls() map[string]string {
	calls := make(map[string]string)
	for _, c := range n.PluginCalls() {
		calls[c.ID] += c.Verb + " " + c.Plugin + ", "
	}
	return calls
}

// PluginCalls returns all runs of the plugins in order.
func (n *Node) PluginCalls() []Call {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]Call(nil), n.calls...)
}
