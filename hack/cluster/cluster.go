package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

const (
	home     = "/var/lib/minicri-cluster"
	cache    = "/var/cache/minicri-cluster"
	maxNodes = 100 // addresses of nodes end at .110

	minicriRuntime    = "minicri"
	containerdRuntime = "containerd"
)

// cluster is what cluster.json holds: enough to find every process and file.
type cluster struct {
	Name    string        `json:"name"`
	Runtime string        `json:"runtime"`
	Port    int           `json:"port"` // of the API server, on the machine's loopback
	Hub     process.Facts `json:"hub"`
	Nodes   []*node       `json:"nodes"`
	// Gates are feature gates of the kubelets.
	Gates map[string]bool `json:"gates,omitempty"`
	// Bare nodes have a runtime and images, and no kubelet that runs.
	Bare bool `json:"bare,omitempty"`

	progress *progress
}

// node is one node. The first one has the control plane.
type node struct {
	Name    string        `json:"name"`
	Address string        `json:"address"`
	PodCIDR string        `json:"pod_cidr"` // from the API server, "" until it has one
	Init    process.Facts `json:"init"`

	cluster *cluster
}

var names = regexp.MustCompile(`^[a-z][a-z0-9-]{0,30}$`)

func checkName(name string) error {
	if !names.MatchString(name) {
		return fmt.Errorf("the name %q has to be a letter, then letters, digits and dashes, 31 at most", name)
	}
	return nil
}

func (c *cluster) dir() string             { return filepath.Join(home, c.Name) }
func (c *cluster) path(name string) string { return filepath.Join(c.dir(), name) }
func (c *cluster) kubeconfig() string      { return c.path("kubeconfig") }
func (c *cluster) cgroupParent() string    { return "/minicri-cluster-" + c.Name }
func (n *node) dir() string                { return n.cluster.path(filepath.Join("nodes", n.Name)) }
func (n *node) path(name string) string    { return filepath.Join(n.dir(), name) }
func (n *node) cgroup() string             { return n.cluster.cgroupParent() + "/" + n.Name }
func (n *node) isControlPlane() bool       { return n.cluster.Nodes[0] == n }

func (c *cluster) node(name string) (*node, error) {
	i := slices.IndexFunc(c.Nodes, func(n *node) bool { return n.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("the cluster %s has no node %q", c.Name, name)
	}
	return c.Nodes[i], nil
}

// create makes the directory of a new cluster and takes its lock.
func create(c *cluster) (*cluster, func(), error) {
	if err := os.MkdirAll(c.dir(), 0o700); err != nil {
		return nil, nil, err
	}
	unlock, err := c.lock()
	if err != nil {
		return nil, nil, err
	}
	if _, err := os.Stat(c.path("cluster.json")); err == nil {
		unlock()
		return nil, nil, fmt.Errorf("the cluster %s is there already; cluster --name %s down removes it", c.Name, c.Name)
	}
	return c, unlock, c.save()
}

// load reads a cluster.
func load(name string) (*cluster, error) {
	c := &cluster{Name: name}
	data, err := os.ReadFile(c.path("cluster.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there is no cluster %s; cluster --name %s up makes it", name, name)
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(data, c); err != nil {
		return nil, fmt.Errorf("%s: %w", c.path("cluster.json"), err)
	}
	for _, n := range c.Nodes {
		n.cluster = c
	}
	return c, nil
}

// lock reads a cluster while no other command changes it.
func lock(name string) (*cluster, func(), error) {
	if _, err := load(name); err != nil {
		return nil, nil, err
	}
	unlock, err := (&cluster{Name: name}).lock()
	if err != nil {
		return nil, nil, err
	}
	c, err := load(name)
	if err != nil {
		unlock()
		return nil, nil, err
	}
	return c, unlock, nil
}

func (c *cluster) lock() (func(), error) {
	file, err := os.OpenFile(c.path("lock"), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		file.Close()
		return nil, fmt.Errorf("another command changes the cluster %s: lock %s: %w", c.Name, file.Name(), err)
	}
	return func() { file.Close() }, nil
}

// save writes cluster.json, whole or not at all.
func (c *cluster) save() error {
	data, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.path("cluster.json.new"), data, 0o600); err != nil {
		return err
	}
	return os.Rename(c.path("cluster.json.new"), c.path("cluster.json"))
}

// interactive runs kubectl, or a command in a node, with our own streams.
func (c *cluster) interactive(ctx context.Context, verb string, arguments []string) error {
	var command *exec.Cmd
	switch {
	case verb == "kubectl":
		command = c.kubectl(ctx, arguments...)
	case len(arguments) < 2:
		return fmt.Errorf("exec takes a node and a command")
	default:
		n, err := c.node(arguments[0])
		if err != nil {
			return err
		}
		command = n.command(ctx, arguments[1:]...)
	}
	command.Stdin, command.Stdout, command.Stderr = os.Stdin, os.Stdout, os.Stderr
	err := command.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		os.Exit(exit.ExitCode()) // the command said why
	}
	return err
}

func (c *cluster) kubectl(ctx context.Context, arguments ...string) *exec.Cmd {
	command := exec.CommandContext(ctx, filepath.Join(c.Nodes[0].path("bin"), "kubectl"), arguments...)
	command.Env = append(os.Environ(), "KUBECONFIG="+c.kubeconfig())
	return command
}

// factsOf names a process that has just been started.
func factsOf(pid int) (process.Facts, error) {
	stat, err := process.ReadStat(pid)
	return process.Facts{PID: pid, StartTime: stat.StartTime}, err
}
