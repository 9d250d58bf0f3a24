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

type answer struct {
	text string
	err  error
}

// exec is runner.Runner.Exec. The plugin goes on without the daemon.
func (d *Daemon) exec(ctx context.Context, run *runner.Run, path string, environment []string) ([]byte, error) {
	d.live()
	done := make(chan answer, 1)
	variable := func(name string) string {
		at := slices.IndexFunc(environment, func(v string) bool { return strings.HasPrefix(v, name+"=") })
		return strings.TrimPrefix(environment[at], name+"=")
	}
	go func() {
		done <- d.plugin(run.Group.Dir, filepath.Base(path), variable("CNI_COMMAND"), variable("CNI_CONTAINERID"))
	}()
	select {
	case a := <-done:
		d.live()
		return []byte(a.text), a.err
	case <-ctx.Done():
		d.live()
		return nil, errors.Join(ctx.Err(), os.WriteFile(filepath.Join(run.Group.Dir, "cgroup.kill"), nil, 0o600))
	}
}

// plugin is the process of a plugin, in the cgroup of a run.
func (n *Node) plugin(group, name, verb, id string) answer {
	populated, kill := filepath.Join(group, "cgroup.events"), filepath.Join(group, "cgroup.kill")
	if err := os.WriteFile(populated, []byte("populated 1\n"), 0o600); err != nil {
		return answer{err: err}
	}
	defer func() { _ = errors.Join(os.RemoveAll(kill), os.Remove(populated)) }()
	n.mu.Lock()
	n.calls = append(n.calls, id+" "+verb+" "+name)
	n.mu.Unlock()
	reached := make(chan error, 1)
	go func() { reached <- n.reach(name + " " + verb) }()
	var err error
	for waiting := true; waiting; {
		select {
		case err = <-reached:
			waiting = false
		case <-time.After(time.Millisecond):
			if _, gone := os.Lstat(kill); gone == nil {
				return answer{err: errors.New("killed")}
			}
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
