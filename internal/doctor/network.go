package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/minicri/minicri/internal/errtext"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/network"
)

// programs looks for what is executed, and for the daemon.
func (c *checker) programs(ctx context.Context) {
	_, err := os.Stat(c.Shim)
	c.when(err == nil, Problem, "shim", c.Shim, fmt.Sprint(err), "run 'make install', or give --shim")
	c.handlers(ctx)
	for _, problem := range c.Plugins {
		c.add("NRI plugin", Problem, problem.Error(), "correct, start or remove it; docs/nri.md")
	}
	for _, problem := range c.Registries {
		c.add("registries", Warning, problem.Error(), "correct the file: it is read at each pull")
	}
	c.daemon()
}

// handlers asks the runtime of each handler what it can do, as the daemon does; what
// the daemon itself says of them is a condition of its status.
func (c *checker) handlers(ctx context.Context) {
	for _, h := range c.Handlers.List(ctx) {
		switch {
		case h.Err != nil:
			c.add("handler", Problem, errtext.Of(h.Err), "install the runtime, or remove the handler from the configuration")
		case len(h.Program) > 0:
			c.add("handler", Good, fmt.Sprintf("%s runs %v", h.Name, h.Program), "")
		}
	}
}

// networks reads the configuration directories as the daemon does.
func (c *checker) networks() {
	found := c.survey("network", c.Config.CNIConf)
	switch {
	case found:
	case c.Config.DefaultNetwork.Enabled:
		configuration, problems := network.DefaultNetwork(c.Config.DefaultNetwork).Survey(c.Config.BinDirs())
		c.network("network", configuration, problems)
	default:
		c.add("network", Problem, "no configuration in "+c.Config.CNIConf, "install a network, or set default_network.enabled")
	}
	for _, path := range c.Config.CNIConfDirs() {
		if path != c.Config.CNIConf && !c.survey("handler network", path) {
			c.add("handler network", Problem, "no configuration in "+path, "install a network there, or remove cni_conf_dir from the handlers that name it")
		}
	}
}

// leftovers of the embedded network are looked for while another one is in its place. A
// daemon that serves removes its table by itself.
func (c *checker) leftovers(ctx context.Context) {
	own, _ := network.Survey(c.Config.CNIConf, nil)
	if own == nil && c.Config.DefaultNetwork.Enabled {
		return
	}
	left, err := network.DefaultNetwork(c.Config.DefaultNetwork).Leftovers(c.Node.PluginMark(), c.networkLists)
	if err != nil {
		c.add("leaks", Problem, err.Error(), "")
	}
	for _, l := range left {
		if table := strings.HasPrefix(l.What, "nftables"); !table || c.Daemon == nil {
			c.leak(l.What+" is the default network's, which is not in use", l.Remove)
		}
	}
}

// networkLists are the configuration lists of networks and of attachments, if all can
// be read.
func (c *checker) networkLists() (lists [][]byte, all bool) {
	for _, path := range append(c.Config.CNIConfDirs(), c.Config.CNIConf) {
		if configuration, _ := network.Survey(path, nil); configuration != nil {
			lists = append(lists, configuration.Bytes)
		}
	}
	ids, err := state.IDs(c.attachmentDir())
	quarantined, quarantineErr := state.Quarantined(c.attachmentDir())
	if err != nil || quarantineErr != nil || len(quarantined) > 0 {
		return nil, false
	}
	for _, id := range ids {
		attachment, err := state.Peek[network.Attachment](c.attachmentDir(), id)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, false
		}
		lists = append(lists, attachment.Config)
	}
	return lists, true
}

// survey looks at one of them, and reports whether it has a network.
func (c *checker) survey(subject, path string) bool {
	configuration, problems := network.Survey(path, c.Config.BinDirs())
	return c.network(subject, configuration, problems)
}

// network shows a network, if there is one, and what is wrong with it.
func (c *checker) network(subject string, configuration *network.Configuration, problems []error) bool {
	for _, problem := range problems {
		c.add(subject, Problem, problem.Error(), "correct or remove it")
	}
	if configuration == nil {
		return false
	}
	c.add(subject, Good, fmt.Sprintf("%q from %s, plugins %v", configuration.Name, cmp.Or(configuration.File, "default_network"), configuration.Plugins), "")
	c.packetFilter(configuration.Plugins)
	return true
}

// packetFilter: masquerading and host ports are done by these programs.
func (c *checker) packetFilter(plugins []string) {
	if !slices.Contains(plugins, "portmap") && !slices.Contains(plugins, "firewall") {
		return
	}
	_, iptables := exec.LookPath("iptables")
	_, nft := exec.LookPath("nft")
	c.when(iptables == nil || nft == nil, Problem, "packet filter", "iptables or nft is there", "neither iptables nor nft is there", "apt-get install nftables iptables")
}
