// Package node keeps the identity of a node: a random id, with which its names in the kernel begin. Two nodes on one
// machine may have the same --root path in their mount namespaces, and must not take each other's things for orphans.
// Beside the id are the directories that running pods depend on, and the cgroups below which pods were made. The
// package owns the durable file ROOT/node.json. A Node holds its lock while it writes the file.
package node

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
)

type facts struct {
	ID       string   `json:"id"`
	State    string   `json:"state"`
	NetnsDir string   `json:"netns_dir"`
	BootID   string   `json:"boot_id"` // the boot in which State and NetnsDir were last used
	Parents  []string `json:"parents"` // the topmost cgroups below which pods and containers were made
}

// Node is the identity of a node.
type Node struct {
	path string

	mu    sync.Mutex
	facts facts
}

// Open reads or makes the identity. It refuses other directories than those of this boot's pods.
func Open(root, stateDir, netnsDir string) (*Node, error) {
	boot, err := process.BootID()
	if err != nil {
		return nil, err
	}
	n, err := Read(root)
	if err != nil {
		return nil, err
	}
	if err := n.Fits(root, stateDir, netnsDir); err != nil {
		return nil, err
	}
	was := n.facts
	n.facts.State, n.facts.NetnsDir, n.facts.BootID = stateDir, netnsDir, boot
	if was.State != stateDir || was.NetnsDir != netnsDir || was.BootID != boot {
		return n, n.write()
	}
	return n, nil
}

// Fits refuses directories that are not those of this boot's pods. Its error begins with the key.
func (n *Node) Fits(root, stateDir, netnsDir string) error {
	if boot, err := process.BootID(); err != nil || n.facts.BootID != boot || !hasRecords(root) {
		return err
	}
	return errors.Join(changed("state", n.facts.State, stateDir), changed("netns_dir", n.facts.NetnsDir, netnsDir))
}

// changed compares directories, not spellings: earlier builds recorded /run/netns for /var/run/netns.
func changed(key, was, is string) error {
	before, err := os.Stat(was)
	now, nowErr := os.Stat(is)
	if filepath.Clean(was) == filepath.Clean(is) || err == nil && nowErr == nil && os.SameFile(before, now) {
		return nil
	}
	return fmt.Errorf("%s: it is %s, but pods of this node have theirs in %s: start with %[1]s = %[3]q, or remove all pods first", key, is, was)
}

// Read is Open without a change, for a node whose daemon may be running.
func Read(root string) (*Node, error) {
	n := &Node{path: filepath.Join(root, "node.json")}
	data, err := state.ReadFile(n.path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && hasRecords(root):
		return nil, fmt.Errorf("read the node's identity: there are records in %s, but no %s: restore the file, or remove all pods and %[1]s", root, n.path)
	case errors.Is(err, fs.ErrNotExist):
		var id [4]byte
		_, _ = rand.Read(id[:]) // never fails (crypto/rand)
		n.facts.ID = hex.EncodeToString(id[:])
		return n, nil
	case err != nil:
		return nil, fmt.Errorf("read the node's identity: %w", err)
	}
	if err := json.Unmarshal(data, &n.facts); err != nil || n.facts.ID == "" {
		return nil, fmt.Errorf("decode the node's identity: %s: it has no id (%w): restore the file, or remove it and all pods", n.path, err)
	}
	return n, nil
}

// hasRecords reports whether there is a record, or one in quarantine.
func hasRecords(root string) bool {
	for _, kind := range []string{"sandboxes", "containers", "attachments"} {
		dir := filepath.Join(root, kind)
		ids, err := state.IDs(dir)
		quarantined, quarantineErr := state.Quarantined(dir)
		if err != nil || quarantineErr != nil || len(ids) > 0 || len(quarantined) > 0 {
			return true
		}
	}
	return false
}

// ScopePrefix begins the names of the scopes that systemd makes for pods and containers, as containerd's do.
const ScopePrefix = "cri-containerd"

// Mark begins the names of namespaces.
func (n *Node) Mark() string { return "minicri-" + n.facts.ID + "-" }

// idTag is in the ids of pods and containers of every node, before the id of the node. Together they have 48 bits, so
// that no other runtime makes such an id by chance.
const idTag = "6d63"

// IDTail ends the ids of this node's pods and containers. Their cgroups have the names that containerd gives: agents
// recognise a container by 64 hexadecimal digits and known prefixes. So the id itself has to tell whose it is.
func (n *Node) IDTail() string { return idTag + n.facts.ID }

// NewID makes the id of a pod or a container.
func (n *Node) NewID() string {
	var random [26]byte
	_, _ = rand.Read(random[:]) // never fails (crypto/rand)
	return hex.EncodeToString(random[:]) + n.IDTail()
}

// IsID reports whether a name can be an id: 64 hexadecimal digits.
func IsID(name string) bool { return len(name) == 64 && strings.Trim(name, "0123456789abcdef") == "" }

// OfCgroup returns the id of the pod or container that this node made a cgroup of this name for. Earlier builds had
// other names, which running pods keep.
func (n *Node) OfCgroup(name string) (id string, ours bool) {
	name = strings.TrimSuffix(name, ".scope")
	for _, earlier := range []string{"minicri-" + n.facts.ID + "-", "minicri-c-" + n.facts.ID + "-"} {
		if id, ours = strings.CutPrefix(name, earlier); ours {
			return id, true
		}
	}
	id = strings.TrimPrefix(name, ScopePrefix+"-")
	return id, IsID(id) && strings.HasSuffix(id, n.IDTail())
}

// PluginMark begins those of the cgroups of CNI plugins.
func (n *Node) PluginMark() string { return "minicri-cni-" + n.facts.ID + "-" }

// Parents returns the topmost cgroups below which pods and containers were made.
func (n *Node) Parents() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.facts.Parents)
}

// Know records where to look for a cgroup, a path below a hierarchy, that is about to be made.
func (n *Node) Know(path string) error {
	parent, below, _ := strings.Cut(strings.Trim(filepath.Clean("/"+path), "/"), "/")
	if below == "" { // the cgroup is itself a topmost one
		parent = ""
	}
	parent = "/" + parent
	n.mu.Lock()
	defer n.mu.Unlock()
	if slices.Contains(n.facts.Parents, parent) {
		return nil
	}
	n.facts.Parents = append(n.facts.Parents, parent)
	if err := n.write(); err != nil {
		n.facts.Parents = n.facts.Parents[:len(n.facts.Parents)-1]
		return err
	}
	return nil
}

// write is called with the lock held, or by Open.
func (n *Node) write() error {
	data, err := json.MarshalIndent(n.facts, "", " ")
	if err != nil {
		return fmt.Errorf("encode the node's identity: %w", err)
	}
	if err := state.WriteFile(n.path, append(data, '\n'), true); err != nil {
		return fmt.Errorf("write the node's identity: %w", err)
	}
	return nil
}
