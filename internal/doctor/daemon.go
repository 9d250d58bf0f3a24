package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/supervisor/client"
)

// Daemon is what the daemon that serves says of itself.
type Daemon struct {
	// Conditions are those of its status.
	Conditions []Condition
	// Orphans are the keys of snapshots that no container explains.
	Orphans []string
	// Err says why there is none.
	Err error
}

// Condition is one of the status: the kubelet runs pods while all that it knows hold.
type Condition struct {
	Type    string
	Holds   bool
	Message string
}

// daemon shows what the daemon says, a line for each condition.
func (c *checker) daemon() {
	switch {
	case c.Daemon == nil:
		c.add("daemon", Warning, "does not serve "+c.Config.Socket, "start it: systemctl start minicri")
		return
	case errors.Is(c.Daemon.Err, fs.ErrPermission):
		c.add("daemon", Problem, c.Daemon.Err.Error(), "")
		return
	case c.Daemon.Err != nil:
		c.add("daemon", Problem, c.Config.Socket+" takes connections, and there is no status of the daemon: "+c.Daemon.Err.Error(), "read its log: journalctl -u minicri")
		return
	}
	c.add("daemon", Good, "serves "+c.Config.Socket, "")
	for _, condition := range c.Daemon.Conditions {
		c.when(condition.Holds, Problem, condition.Type, "so says the daemon", cmp.Or(condition.Message, "not so, says the daemon"), adviceOn(condition.Type))
	}
	for _, key := range c.Daemon.Orphans {
		c.add("leak", Problem, "snapshot "+key+" has no container", "restart the daemon, which removes it")
	}
}

// adviceOn is what to do about a condition that does not hold.
func adviceOn(condition string) string {
	switch kind, _, _ := strings.Cut(condition, "/"); kind {
	case "NetworkReady":
		return "until then the kubelet runs no pod but those of the node's network: docs/troubleshooting.md"
	case "RuntimeHandlerReady":
		return "install what is missing, or remove the handler from the configuration"
	case "OlderBuildsServed":
		return "install the version that is named, and remove these pods before the next upgrade"
	default:
		return "until then pods do not run as they ask for"
	}
}

// supervisors names those of other builds than the one that the daemon would use.
func (c *checker) supervisors() {
	build, err := client.BuildOf(c.Shim)
	if err != nil {
		return // programs has said so
	}
	ids, err := state.IDs(c.recordDir())
	if err != nil {
		c.add("supervisors", Problem, err.Error(), "")
	}
	pods := make(map[string]int)
	for _, id := range ids {
		if record, err := state.Peek[sandbox.Record](c.recordDir(), id); err == nil { // else unread says so
			pods[record.Supervisor]++
		}
	}
	older, err := client.Older(filepath.Join(c.Config.State, "shims"), build, pods)
	if err != nil {
		c.add("supervisors", Problem, err.Error(), "")
	}
	for _, one := range older {
		message := fmt.Sprintf("build %s, version %s, has %d pods", one.Group, one.Version, one.Pods)
		if one.Problem != "" {
			c.add("supervisor", Problem, message+": "+one.Problem, fmt.Sprintf("install minicri %s again, and remove these pods before the next upgrade", one.Version))
			continue
		}
		c.add("supervisor", Good, message+": it ends with the last of them", "")
	}
}
