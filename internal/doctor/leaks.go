package doctor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

// leaks compares what carries the node's mark with the records on disk. A record, also an unreadable one,
// exists before and after what it describes. A daemon may be at work, so we look for it last.
func (c *checker) leaks() {
	before := len(c.findings)
	hierarchies, err := cgroup.FindHierarchies()
	c.failed("leaks", err)
	places := &sweep.Places{
		Node: c.Node, Hierarchies: hierarchies, Netns: c.netns(), Userns: namespace.Find(filepath.Join(c.Config.State, "userns"), c.Node.Mark()),
		Root: c.Config.Root, State: c.Config.State, Kill: time.Duration(c.Config.Limits.Kill),
	}
	owners := sweep.Owners{Pod: c.hasRecord, Container: c.hasContainer, Attached: c.hasAttachment}
	orphans, err := places.Find(owners)
	if len(orphans) > 0 && c.Building != nil { // a daemon proves by a pod without a record that it can make one
		before := orphans
		building, askErr := c.Building()
		if orphans, err = places.Find(owners); askErr != nil {
			orphans, err = nil, fmt.Errorf("what is a leak cannot be told from what the daemon makes: %w", askErr)
		}
		orphans = slices.DeleteFunc(orphans, func(o sweep.Orphan) bool { return slices.Contains(building, o.ID) || !slices.Contains(before, o) })
	}
	for _, o := range orphans {
		c.leak(fmt.Sprintf("%s %s has no %s", o.Kind, o.Path, o.Owner()), func() error { return places.Remove(o) })
	}
	if err != nil {
		c.problem("leaks", err.Error(), "make it readable and run minicri check again")
	}
	for _, id := range c.ids("leaks", c.containerDir()) {
		record, err := state.Peek[container.Record](c.containerDir(), id)
		if err == nil && !c.hasRecord(record.SandboxID) && c.hasContainer(id) { // else removed at the same time, or for the daemon to quarantine
			c.problem("leak", fmt.Sprintf("container %s has no pod", id), "the daemon removes it when it starts")
		}
	}
	c.lostAddresses()
	if len(c.findings) == before {
		c.add("leaks", Good, "none", "")
	}
	c.attachments()
	c.quarantine()
	c.leftovers()
	c.sandboxes()
}

// lostAddresses shows those that an IPAM plugin holds for no pod.
func (c *checker) lostAddresses() {
	lists, all := c.networkLists()
	if !all {
		return // a record that cannot be read may have them
	}
	if embedded, _ := network.DefaultNetwork(c.Config.DefaultNetwork).Survey(c.Config.BinDirs()); embedded != nil {
		lists = append(lists, embedded.Bytes)
	}
	known := func(id string) bool { return c.hasAttachment(id) || c.hasRecord(id) }
	shown := make(map[string]bool)
	for _, list := range lists {
		lost, err := network.LostAddresses(list, "", known)
		c.failed("leaks", err)
		for _, a := range lost {
			if at := a.Network + a.Address; !shown[at] {
				shown[at] = true
				c.leak(fmt.Sprintf("address %s of network %q is held for %s, which no pod has", a.Address, a.Network, a.ID), a.Free)
			}
		}
	}
}

func (c *checker) leak(message string, fix func() error) {
	finding := c.problem("leak", message, "minicri check --fix removes it")
	finding.fix, finding.fixed = fix, "removed"
}

func (c *checker) ids(subject, dir string) []string {
	ids, err := state.IDs(dir)
	c.failed(subject, err)
	return ids
}

func (c *checker) hasRecord(id string) bool     { return hasFile(c.recordDir(), id) }
func (c *checker) hasContainer(id string) bool  { return hasFile(c.containerDir(), id) }
func (c *checker) hasAttachment(id string) bool { return hasFile(c.attachmentDir(), id) }

// hasFile reports whether there is, or may be, a record, in quarantine too.
func hasFile(dir, id string) bool {
	if _, err := os.Lstat(filepath.Join(dir, id+".json")); !errors.Is(err, fs.ErrNotExist) {
		return true
	}
	quarantined, err := state.Quarantined(dir)
	return err != nil || slices.ContainsFunc(quarantined, func(path string) bool { return state.IDOf(path) == id })
}

func (c *checker) recordDir() string         { return filepath.Join(c.Config.Root, "sandboxes") }
func (c *checker) factsDir() string          { return filepath.Join(c.Config.State, "facts") }
func (c *checker) containerDir() string      { return filepath.Join(c.Config.Root, "containers") }
func (c *checker) attachmentDir() string     { return filepath.Join(c.Config.Root, "attachments") }
func (c *checker) containerFactsDir() string { return filepath.Join(c.Config.Root, "container-facts") }
func (c *checker) shimsDir() string          { return filepath.Join(c.Config.State, "shims") }

func (c *checker) netns() *namespace.Dir { return namespace.Find(c.Config.NetnsDir, c.Node.Mark()) }

// attachments shows those that no sandbox owns: their DEL has to succeed. They are one line for each network, because
// mostly one cause keeps all of them.
func (c *checker) attachments() {
	dir := c.attachmentDir()
	waiting := make(map[string][]network.Attachment)
	for _, id := range c.ids("attachments", dir) {
		attachment, err := state.Peek[network.Attachment](dir, id)
		switch {
		case errors.Is(err, os.ErrNotExist): // removed at the same time
		case err != nil:
			c.problem("attachment", fmt.Sprintf("%s: %v", id, err), "")
		case attachment.Releasing || !c.hasRecord(id) && c.hasAttachment(id):
			waiting[attachment.Network] = append(waiting[attachment.Network], attachment)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(waiting)) {
		c.waiting(name, waiting[name])
	}
}

// waiting adds the line of one network.
func (c *checker) waiting(name string, attachments []network.Attachment) {
	var pods, ids []string
	tries, cause := 0, ""
	for _, a := range attachments {
		pods, ids = append(pods, podName(a.ID, a.Args["K8S_POD_NAMESPACE"], a.Args["K8S_POD_NAME"])), append(ids, a.ID)
		if a.Tries >= tries && a.LastError != "" {
			tries, cause = a.Tries, ": "+a.LastError
		}
	}
	message := fmt.Sprintf("%s on network %q waits for CNI DEL, %s%s", few(pods), name, times(tries, "failed try", "failed tries"), cause)
	if len(pods) > 1 {
		message = fmt.Sprintf("%d attachments on network %q wait for CNI DEL (%s), up to %s each%s", len(pods), name, few(pods),
			times(tries, "failed try", "failed tries"), cause)
	}
	f := c.problem("attachment", message, "repair the network or its plugins: the daemon's next DEL succeeds then, and frees the addresses")
	f.IDs = ids
	f.abandon = func(id string) error {
		file := filepath.Join(c.attachmentDir(), id+".json")
		cached := network.CachePath("", name, id)
		return errors.Join(os.Remove(file), os.RemoveAll(cached), c.netns().Remove(id))
	}
	if removed := c.removedForGood(name, attachments[0]); removed != "" {
		f.Message += ": " + removed
		f.Advice = "minicri check --fix gives them up; or install the network again, and the daemon's next DEL succeeds"
		f.fixed = "given up"
		f.fix = func() (err error) {
			for _, id := range ids {
				err = errors.Join(err, f.abandon(id))
			}
			return err
		}
	}
}

// removedForGood returns why no DEL of a network can succeed any more, "" if one can: it has no configuration, and a
// plugin of it no program.
func (c *checker) removedForGood(name string, of network.Attachment) string {
	for _, dir := range append(c.Config.CNIConfDirs(), c.Config.CNIConf) {
		if slices.Contains(network.Names(dir), name) {
			return ""
		}
	}
	if c.Config.DefaultNetwork.Enabled && c.Config.DefaultNetwork.Name == name {
		return ""
	}
	missing := network.MissingPlugins(of.Config, c.Config.BinDirs())
	if len(missing) == 0 {
		return ""
	}
	return fmt.Sprintf("the network was removed from this node, with its plugins %v", missing)
}

// podName names a pod as people do, with the beginning of its id.
func podName(id, namespace, name string) string {
	if name == "" {
		return id
	}
	return fmt.Sprintf("%s/%s (%.12s)", namespace, name, id)
}

// few names the first of many.
func few(names []string) string {
	const most = 3
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}

func times(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprint(n, " ", many)
}

// pod names the pod of a sandbox.
func (c *checker) pod(id string) string {
	record, err := state.Peek[sandbox.Record](c.recordDir(), id)
	var config struct {
		Metadata struct{ Name, Namespace string }
	}
	if err != nil || json.Unmarshal(record.Config, &config) != nil {
		return id
	}
	return podName(id, config.Metadata.Namespace, config.Metadata.Name)
}

// retry tries records in quarantine again, which tell by ownerOf whose they are, or do not.
func retry[T any](ownerOf func(T) string) func(path string) error {
	return func(path string) error { return state.Retry(path, ownerOf) }
}

func (c *checker) ownerOfAttachment(a network.Attachment) string {
	if a.Node != "" && a.Node != c.Node.PluginMark() {
		return "another node, " + a.Node
	}
	return a.ID
}

// quarantine shows records that are of no use. Fix tries them again: a person may have repaired them.
func (c *checker) quarantine() {
	for _, kind := range []struct {
		dir   string
		retry func(path string) error
	}{
		{c.recordDir(), retry(func(r sandbox.Record) string { return r.ID })},
		{c.factsDir(), retry[sandbox.Facts](nil)},
		{c.containerDir(), retry(func(r container.Record) string { return r.ID })},
		{c.containerFactsDir(), retry[container.Facts](nil)},
		{c.attachmentDir(), retry(c.ownerOfAttachment)},
	} {
		files, err := state.Quarantined(kind.dir)
		if err != nil {
			c.problem("quarantine", err.Error(), "repair the disk or the directory: until then the daemon does not start")
		}
		for _, file := range files {
			finding := c.problem("quarantine", file+" cannot be decoded, or is not its own: what has its id is left alone",
				"repair the file, run 'minicri check --fix' and restart the daemon; or give it up with --fix --force: the next start removes what then has no record")
			finding.fix, finding.fixed = func() error { return kind.retry(file) }, "put back, restart the daemon"
			finding.force, finding.id = func() error { return state.GiveUp(file) }, state.IDOf(file)
		}
		for _, id := range c.ids("records", kind.dir) { // those that cannot be read stay where they are
			if _, err := state.ReadFile(filepath.Join(kind.dir, id+".json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
				c.problem("records", fmt.Sprintf("a record cannot be read, and its object is left alone: %v", err), "repair the disk or the file, and restart the daemon")
			}
		}
	}
}

// leftovers shows what the unused embedded network has left. A running daemon removes its own table.
func (c *checker) leftovers() {
	own, _ := network.Survey(c.Config.CNIConf, nil)
	if own == nil && c.Config.DefaultNetwork.Enabled {
		return
	}
	left, err := network.DefaultNetwork(c.Config.DefaultNetwork).Leftovers(c.Node.PluginMark(), c.networkLists)
	c.failed("leaks", err)
	for _, l := range left {
		if table := strings.HasPrefix(l.What, "nftables"); !table || c.Daemon == nil {
			c.leak(l.What+" is the default network's, which is not in use", l.Remove)
		}
	}
}

// networkLists returns the configuration lists of networks and attachments, and whether all could be read.
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
		if errors.Is(err, fs.ErrNotExist) { // removed since
			continue
		}
		if err != nil {
			return nil, false
		}
		lists = append(lists, attachment.Config)
	}
	return lists, true
}

// sandboxes compares facts with the kernel, and asks a daemon, which writes them late, about contradictions.
func (c *checker) sandboxes() {
	for _, id := range c.ids("sandboxes", c.factsDir()) {
		facts, err := state.Peek[sandbox.Facts](c.factsDir(), id)
		if err != nil || !facts.Ready() || !c.hasRecord(id) {
			continue
		}
		pause, err := process.Open(facts.Pause)
		if err == nil {
			err = pause.Close()
		}
		lost, off := len(facts.Addresses) > 0 && !c.netns().Alive(id), offBridge(facts.CNIResult)
		switch {
		case (err != nil || lost || off != nil) && c.Ended != nil && c.Ended(id):
			continue
		case errors.Is(err, process.ErrGone):
			c.problem("sandbox", fmt.Sprintf("%s is recorded as Ready, but its pause process is gone: %v", c.pod(id), err), "the daemon notices when it starts, and the kubelet makes the pod again")
		case err != nil:
			c.problem("sandbox", fmt.Sprintf("whether the pause process of %s runs cannot be known: %v", c.pod(id), err), "look for what keeps root from /proc")
		}
		if lost {
			c.problem("sandbox", c.pod(id)+" has lost its network namespace", "stop and remove the pod")
		}
		if off != nil && !lost {
			c.problem("sandbox", fmt.Sprintf("%s has no network: %v", c.pod(id), off), "remove the pod, which is made again; its network makes the bridge")
		}
	}
}

// offBridge returns an error if a pod's link has left its bridge, which else only a CHECK finds. The answer of the
// plugin bridge begins with the bridge, the link on it, and that in the pod.
func offBridge(answers json.RawMessage) error {
	var all []struct {
		Interfaces []struct{ Name, Sandbox string }
	}
	if err := json.Unmarshal(answers, &all); err != nil || len(all) == 0 || len(all[0].Interfaces) < 3 {
		return nil
	}
	bridge, link, inside := all[0].Interfaces[0], all[0].Interfaces[1], all[0].Interfaces[2]
	if bridge.Sandbox != "" || link.Sandbox != "" || inside.Sandbox == "" {
		return nil
	}
	found, err := netlink.LinkByName(bridge.Name)
	end, linkErr := netlink.LinkByName(link.Name)
	_, isBridge := found.(*netlink.Bridge)
	switch {
	case isGone(err):
		return fmt.Errorf("the bridge %s: %w", bridge.Name, err)
	case isGone(linkErr):
		return fmt.Errorf("its link %s: %w", link.Name, linkErr)
	case isBridge && linkErr == nil && end.Attrs().MasterIndex != found.Attrs().Index:
		return fmt.Errorf("its link %s is off the bridge %s", link.Name, bridge.Name)
	}
	return nil
}

// isGone reports whether an error of LinkByName says that there is no such link. Others say nothing of the node.
func isGone(err error) bool {
	_, gone := errors.AsType[netlink.LinkNotFoundError](err)
	return gone
}
