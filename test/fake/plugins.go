package fake

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/minicri/minicri/network/runner"
)

// Chain are the plugins of the network, whose first one has the addresses.
var Chain = []string{"first", "middle", "last"}

const conflist = `{"cniVersion": "1.0.0", "name": "net",
	"plugins": [{"type": "first"}, {"type": "middle"}, {"type": "last"}]}`

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
func (d *Daemon) exec(ctx context.Context, run *runner.Run, path string, environment []string) ([]byte, error) {
	d.live()
	done, kill := make(chan answer, 1), make(chan struct{})
	variable := func(name string) string {
		at := slices.IndexFunc(environment, func(v string) bool { return strings.HasPrefix(v, name+"=") })
		return strings.TrimPrefix(environment[at], name+"=")
	}
	populated := filepath.Join(run.Group.Dir, populatedFile) // a process is in its cgroup when the start returns
	if err := os.WriteFile(populated, []byte("populated 1\n"), 0o600); err != nil {
		return nil, err
	}
	go func() {
		done <- d.plugin(kill, run.Group.Dir, filepath.Base(path), variable("CNI_COMMAND"), variable("CNI_CONTAINERID"))
	}()
	select {
	case a := <-done:
		d.live()
		return []byte(a.text), a.err
	case <-ctx.Done():
		d.live()
		close(kill)
		return nil, ctx.Err()
	}
}

// plugin is the process of a plugin, in the cgroup of a run.
func (n *Node) plugin(kill <-chan struct{}, group, name, verb, id string) answer {
	populated, killed := filepath.Join(group, populatedFile), filepath.Join(group, "cgroup.kill")
	defer func() {
		_ = errors.Join(os.RemoveAll(killed), os.Remove(populated))
		// A kill that saw the plugin writes its file at this moment, and looks again a millisecond later.
		time.AfterFunc(time.Millisecond/2, func() { _ = os.RemoveAll(killed) })
	}()
	n.mu.Lock()
	n.calls[id] += verb + " " + name + ", "
	n.mu.Unlock()
	reached := make(chan error, 1)
	go func() { reached <- n.reach(name + " " + verb) }()
	var err error
	for waiting := true; waiting; {
		select {
		case err = <-reached:
			waiting = false
		case <-kill:
			return answer{err: errors.New("killed")}
		case <-time.After(time.Millisecond):
		}
		_, notKilled := os.Lstat(killed)
		_, rebooted := os.Lstat(populated)
		if notKilled == nil || rebooted != nil {
			return answer{err: errors.New("killed")}
		}
	}
	switch {
	case err != nil && verb == "ADD":
		return answer{text: fmt.Sprintf(`{"cniVersion": "1.0.0", "code": 100, "msg": %q}`, err)}
	case err != nil:
		return answer{err: err}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case name == Chain[0] && verb == "ADD":
		n.note("address", id)
	case name == Chain[0] && verb == "DEL":
		n.forget("address", id)
	}
	return answer{text: `{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "pod"}],
		"ips": [{"address": "10.1.0.2/24", "interface": 0}]}`}
}
