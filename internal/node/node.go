// Package node keeps the identity of a node: an id, made at random once, from which
// the beginning of every name in the kernel follows. Two nodes on one machine may
// have the same --root path, each in a mount namespace of its own, and must never
// take the other's things for their orphans. With the id are kept the directories
// that running pods depend on, and the cgroups below which pods were made.
//
// It owns the file ROOT/node.json, which is durable. A Node may be used by many
// goroutines; its lock is held while the file is written.
package node

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
)

// facts are the file.
type facts struct {
	ID       string `json:"id"`
	State    string `json:"state"`
	NetnsDir string `json:"netns_dir"`
	// BootID is the boot that State and NetnsDir were last used in.
	BootID string `json:"boot_id"`
	// Parents are the topmost cgroups below which pods and containers were made.
	Parents []string `json:"parents"`
}

// Node is the identity of a node.
type Node struct {
	path string

	mu    sync.Mutex
	facts facts
}

// Open reads the identity of the node, or makes one. It refuses a state or netns directory in
// which pods of this boot do not have their files and namespaces.
func Open(root, stateDir, netnsDir string) (*Node, error) {
	boot, err := process.BootID()
	if err != nil {
		return nil, err
	}
	n, err := Read(root)
	if err != nil {
		return nil, err
	}
	if n.facts.BootID == boot && hasRecords(root) {
		if err := errors.Join(changed("state", n.facts.State, stateDir), changed("netns_dir", n.facts.NetnsDir, netnsDir)); err != nil {
			return nil, err
		}
	}
	was := n.facts
	n.facts.State, n.facts.NetnsDir, n.facts.BootID = stateDir, netnsDir, boot
	if was.State != stateDir || was.NetnsDir != netnsDir || was.BootID != boot {
		return n, n.write()
	}
	return n, nil
}

func changed(key, was, is string) error {
	if filepath.Clean(was) == filepath.Clean(is) {
		return nil
	}
	return fmt.Errorf("%s is %s, but pods of this node have theirs in %s: start with %[1]s = %[3]q, or remove all pods first", key, is, was)
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

// Mark is what the names of the cgroups of pods and of namespaces begin with.
func (n *Node) Mark() string { return "minicri-" + n.facts.ID + "-" }

// ContainerMark is the same for the cgroups of containers: neither mark begins
// with the other.
func (n *Node) ContainerMark() string { return "minicri-c-" + n.facts.ID + "-" }

// PluginMark is the same for the cgroups of runs of CNI plugins.
func (n *Node) PluginMark() string { return "minicri-cni-" + n.facts.ID + "-" }

// Parents are the topmost cgroups below which pods and containers were made.
func (n *Node) Parents() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.facts.Parents)
}

// Know notes the parent of a cgroup that is about to be made, a path below a hierarchy: the
// node's things are looked for there.
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
