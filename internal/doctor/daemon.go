package doctor

import (
	"cmp"
	"strings"
)

// Daemon is what the daemon that serves says of itself.
type Daemon struct {
	// Conditions are those of its status.
	Conditions []Condition
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
	case c.Daemon.Err != nil:
		c.add("daemon", Problem, c.Config.Socket+" takes connections, and there is no status of the daemon: "+c.Daemon.Err.Error(), "read its log: journalctl -u minicri")
		return
	}
	c.add("daemon", Good, "serves "+c.Config.Socket, "")
	for _, condition := range c.Daemon.Conditions {
		c.when(condition.Holds, Problem, condition.Type, "so says the daemon", cmp.Or(condition.Message, "not so, says the daemon"), adviceOn(condition.Type))
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
