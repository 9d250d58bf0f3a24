package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
)

const (
	kubeadmFile   = "/etc/kubernetes/kubeadm.yaml"
	discoveryFile = "/etc/kubernetes/discovery.conf"
)

// built is what the nodes of a cluster are made of.
type built struct {
	programs, version, pause string   // pause is the image's name
	everywhere, controlPlane []string // image archives
}

// build builds what is missing.
func (c *cluster) build(ctx context.Context) (*built, error) {
	b := &built{}
	var err error
	if b.programs, b.version, err = programs(ctx, c.progress); err != nil {
		return nil, err
	}
	tag, err := pauseTag(ctx, b)
	if err != nil {
		return nil, err
	}
	b.pause = repository + "/pause:" + tag
	b.everywhere, b.controlPlane, err = archives(ctx, b.programs, b.version, tag, c.progress)
	return b, err
}

// offer links the programs and the images of a node into a directory.
func (b *built) offer(directory string) error {
	if err := errors.Join(os.RemoveAll(directory), os.MkdirAll(directory, 0o755)); err != nil {
		return err
	}
	files := slices.Concat(b.everywhere, b.controlPlane)
	for _, program := range []string{"kubelet", "kubeadm", "kubectl", "kube-proxy"} {
		files = append(files, filepath.Join(b.programs, program))
	}
	for _, file := range files {
		if err := install(file, filepath.Join(directory, filepath.Base(file))); err != nil {
			return err
		}
	}
	return nil
}

// pauseTag is the tag of the pause image that kubeadm wants to find.
func pauseTag(ctx context.Context, b *built) (string, error) {
	list, err := output(exec.CommandContext(ctx, filepath.Join(b.programs, "kubeadm"),
		"config", "images", "list", "--kubernetes-version", b.version, "--image-repository", repository))
	if err != nil {
		return "", err
	}
	for name := range strings.FieldsSeq(list) {
		if tag, ok := strings.CutPrefix(name, repository+"/pause:"); ok {
			return tag, nil
		}
	}
	return "", fmt.Errorf("kubeadm lists no pause image: %s", list)
}

// up makes the cluster. What a failed one has made stays for a look, until down.
func (c *cluster) up(ctx context.Context, nodes int) error {
	b, err := c.build(ctx)
	if err != nil {
		return err
	}
	c.progress.did("programs and images of Kubernetes %s are in %s", b.version, b.programs)
	if err := c.startHub(); err != nil {
		return err
	}
	for i := range nodes {
		c.Nodes = append(c.Nodes, &node{Name: fmt.Sprintf("node%d", i+1), Address: nodeAddress(i), cluster: c})
	}
	if err := c.startNodes(ctx, b, c.Nodes); err != nil {
		return err
	}
	if c.Bare {
		return nil
	}
	first := c.Nodes[0]
	if err := first.initialize(ctx, b.version); err != nil {
		return err
	}
	c.progress.did("kubeadm init on %s; KUBECONFIG=%s", first.Name, c.kubeconfig())
	joining, joinContext := errgroup.WithContext(ctx)
	for _, n := range c.Nodes[1:] {
		joining.Go(func() error { return n.join(joinContext) })
	}
	if err := joining.Wait(); err != nil {
		return err
	}
	if nodes > 1 {
		c.progress.did("kubeadm join on the others")
	}
	return c.awaitReady(ctx)
}

// startNodes starts nodes side by side: runtime running, images imported.
func (c *cluster) startNodes(ctx context.Context, b *built, nodes []*node) error {
	for _, n := range nodes {
		if err := n.furnish(b); err != nil {
			return err
		}
		if err := n.power(); err != nil {
			return err
		}
	}
	starting, ctx := errgroup.WithContext(ctx)
	for _, n := range nodes {
		starting.Go(func() error {
			if err := n.awaitRuntime(ctx); err != nil {
				return err
			}
			return n.importBuilt(ctx, b)
		})
	}
	if err := starting.Wait(); err != nil {
		return err
	}
	c.progress.did("%d nodes started, with %s and its images", len(nodes), c.Runtime)
	return nil
}

// furnish fills the node's disk.
func (n *node) furnish(b *built) error {
	for _, d := range disk {
		if err := os.MkdirAll(n.path(d[1]), 0o755); err != nil {
			return err
		}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	top, err := tree()
	if err != nil {
		return err
	}
	for _, name := range []string{"kubelet", "kubeadm", "kubectl", "etcdctl"} {
		if err := install(filepath.Join(b.programs, name), n.path("bin/"+name)); err != nil {
			return err
		}
	}
	if err := install(self, n.path("bin/cluster")); err != nil {
		return err
	}
	if err := n.installRuntime(filepath.Join(top, "bin")); err != nil {
		return err
	}
	if n.cluster.Runtime == containerdRuntime {
		if err := n.installContainerd(filepath.Join(top, "bin"), b.pause); err != nil {
			return err
		}
	}
	plugins, err := filepath.Glob(filepath.Join(top, "bin/cni/*"))
	if err != nil || len(plugins) == 0 {
		return errors.Join(err, fmt.Errorf("no CNI plugins in %s: run make setup", filepath.Join(top, "bin/cni")))
	}
	for _, plugin := range plugins {
		if err := install(plugin, n.path("plugins/"+filepath.Base(plugin))); err != nil {
			return err
		}
	}
	return n.configureRuntime(b.pause)
}

func (n *node) installRuntime(directory string) error {
	for _, name := range []string{"minicri", "minicri-shim"} {
		if err := install(filepath.Join(directory, name), n.path("bin/"+name)); err != nil {
			return fmt.Errorf("%w; run make build", err)
		}
	}
	return nil
}

// initialize makes the control plane.
func (n *node) initialize(ctx context.Context, version string) error {
	if err := writeObjects(n.path("etc-kubernetes/kubeadm.yaml"), n.initConfiguration(version)); err != nil {
		return err
	}
	if err := n.kubeadm(ctx, "init", "--config", kubeadmFile); err != nil {
		return err
	}
	return n.writeKubeconfigs()
}

// join joins the node to the cluster.
func (n *node) join(ctx context.Context) error {
	if err := install(n.cluster.path("discovery.conf"), n.path("etc-kubernetes/discovery.conf")); err != nil {
		return err
	}
	if err := writeObjects(n.path("etc-kubernetes/kubeadm.yaml"), n.joinConfiguration()); err != nil {
		return err
	}
	return n.kubeadm(ctx, "join", "--config", kubeadmFile)
}

// kubeadm runs kubeadm in the node; what it says is in kubeadm.log.
func (n *node) kubeadm(ctx context.Context, arguments ...string) error {
	log, err := os.OpenFile(n.path("kubeadm.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	command := n.command(ctx, append([]string{"kubeadm", "--v=1"}, arguments...)...)
	command.Stdout, command.Stderr = log, log
	if err := command.Run(); err != nil {
		return fmt.Errorf("kubeadm %s on %s: %w, see %s", arguments[0], n.Name, err, log.Name())
	}
	return nil
}

// writeKubeconfigs writes one for this machine, which goes by the relay, and one
// that tells nodes which cluster to join.
func (n *node) writeKubeconfigs() error {
	admin, err := os.ReadFile(n.path("etc-kubernetes/admin.conf"))
	if err != nil {
		return err
	}
	c, own := n.cluster, fmt.Sprintf("https://%s:%s", n.Address, apiPort)
	if !strings.Contains(string(admin), own) {
		return fmt.Errorf("admin.conf of kubeadm does not name the server %s", own)
	}
	relayed := strings.ReplaceAll(string(admin), own, fmt.Sprintf("https://127.0.0.1:%d", c.Port))
	if err := os.WriteFile(c.kubeconfig(), []byte(relayed), 0o600); err != nil {
		return err
	}
	return writeObjects(c.path("discovery.conf"), []object{discovery(string(admin), own)})
}

// discovery is a kubeconfig that names a cluster and its authority, and no user.
func discovery(admin, server string) object {
	_, rest, _ := strings.Cut(admin, "certificate-authority-data: ")
	authority, _, _ := strings.Cut(rest, "\n")
	return object{
		"apiVersion": "v1", "kind": "Config",
		"clusters": []object{{"name": "cluster", "cluster": object{"server": server, "certificate-authority-data": authority}}},
		"contexts": []object{{"name": "cluster", "context": object{"cluster": "cluster", "user": "nobody"}}}, "current-context": "cluster",
		"users": []object{{"name": "nobody", "user": object{}}},
	}
}
