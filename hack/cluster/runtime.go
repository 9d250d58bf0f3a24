package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// awaitRuntime waits until the node's runtime answers.
func (n *node) awaitRuntime(ctx context.Context) error {
	return n.await(ctx, n.cluster.Runtime+" answers", func() (bool, error) {
		client, closeClient, err := n.runtime()
		if err != nil {
			return false, err
		}
		defer closeClient()
		_, err = client.Version(ctx, &runtimeapi.VersionRequest{})
		return err == nil, err
	})
}

// runtime is a client of the node's runtime.
func (n *node) runtime() (client runtimeapi.RuntimeServiceClient, closeClient func() error, err error) {
	socket := minicriSocket
	if n.cluster.Runtime == containerdRuntime {
		socket = containerdSocket
	}
	connection, err := grpc.NewClient("unix://"+n.file(socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, nil, err
	}
	return runtimeapi.NewRuntimeServiceClient(connection), connection.Close, nil
}

// importBuilt imports the images that the node's pods need.
func (n *node) importBuilt(ctx context.Context, b *built) error {
	files := b.everywhere
	if n.isControlPlane() {
		files = append(files[:len(files):len(files)], b.controlPlane...)
	}
	for _, file := range files {
		if err := n.importArchive(ctx, file); err != nil {
			return err
		}
	}
	return nil
}

// importArchive imports a file of this machine: as the standard input, the node
// need not see it.
func (n *node) importArchive(ctx context.Context, file string) error {
	archive, err := os.Open(file)
	if err != nil {
		return err
	}
	defer archive.Close()
	command := n.importCommand(ctx)
	command.Stdin = archive
	if _, err := output(command); err != nil {
		return fmt.Errorf("import %s on %s: %w", file, n.Name, err)
	}
	return nil
}

func (n *node) importCommand(ctx context.Context) *exec.Cmd {
	if n.cluster.Runtime == containerdRuntime {
		return n.command(ctx, "ctr", "-n", "k8s.io", "images", "import", "-")
	}
	return n.command(ctx, "minicri", "image", "import", "-")
}

// importEverywhere imports an archive on all nodes side by side.
func (c *cluster) importEverywhere(ctx context.Context, file string) error {
	importing, ctx := errgroup.WithContext(ctx)
	for _, n := range c.Nodes {
		importing.Go(func() error { return n.importArchive(ctx, file) })
	}
	if err := importing.Wait(); err != nil {
		return err
	}
	c.progress.did("imported %s on %d nodes", filepath.Base(file), len(c.Nodes))
	return nil
}

// upgradeRuntime puts new binaries on every node, one after the other, and starts
// the daemon again. Pods keep running.
func (c *cluster) upgradeRuntime(ctx context.Context, directory string) error {
	if c.Runtime != minicriRuntime {
		return fmt.Errorf("the cluster %s runs %s", c.Name, c.Runtime)
	}
	for _, n := range c.Nodes {
		if err := n.installRuntime(directory); err != nil {
			return err
		}
		if err := n.endService(ctx, minicriRuntime); err != nil {
			return err
		}
		if err := n.awaitRuntime(ctx); err != nil {
			return err
		}
		version, err := n.run(ctx, "minicri", "version")
		if err != nil {
			return err
		}
		c.progress.did("%s runs %s", n.Name, version[:len(version)-1])
	}
	return nil
}
