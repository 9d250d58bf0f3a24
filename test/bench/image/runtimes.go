package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// contender is a runtime under test.
type contender struct {
	name  string
	start func(ctx context.Context, dir string) (*child, error)
}

// ours, theirs and withoutSync are the rows of the table.
const (
	ours        = "minicri"
	theirs      = "containerd"
	withoutSync = "minicri-nosync"
)

func contenders(minicri string) []contender {
	return []contender{
		{ours, func(ctx context.Context, dir string) (*child, error) { return startMinicri(ctx, minicri, dir, "") }},
		{theirs, startContainerd},
		{withoutSync, func(ctx context.Context, dir string) (*child, error) {
			return startMinicri(ctx, minicri, dir, "[images]\nsync = false\n")
		}},
	}
}

const socketName = "cri.sock"

// startMinicri starts the daemon with nothing of the machine's but the program.
func startMinicri(ctx context.Context, program, dir, config string) (*child, error) {
	path := filepath.Join(dir, "config.toml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		return nil, err
	}
	in := func(name string) string { return filepath.Join(dir, name) }
	return start(ctx, program, "--config", path, "--root", in("root"), "--state", in("state"), "--socket", in(socketName),
		"--netns-dir", in("netns"), "--cni-conf-dir", in("cni"), "--log-level", "error")
}

// containerdConfig leaves the CRI plugin and what it needs.
const containerdConfig = `version = 2
root = %[1]q
state = %[2]q
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.internal.v1.tracing"]
[grpc]
  address = %[3]q
[plugins."io.containerd.grpc.v1.cri"]
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = %[4]q
`

func startContainerd(ctx context.Context, dir string) (*child, error) {
	config := fmt.Sprintf(containerdConfig, filepath.Join(dir, "root"), filepath.Join(dir, "state"),
		filepath.Join(dir, socketName), filepath.Join(dir, "cni"))
	path := filepath.Join(dir, "config.toml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		return nil, err
	}
	return start(ctx, "containerd", "--config", path, "--log-level", "error")
}

// connect waits until the CRI answers.
func connect(ctx context.Context, dir string) (*grpc.ClientConn, error) {
	if err := waitForSocket(ctx, filepath.Join(dir, socketName)); err != nil {
		return nil, err
	}
	connection, err := grpc.NewClient("unix://"+filepath.Join(dir, socketName), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	for began := time.Now(); ; {
		_, err := runtimeapi.NewImageServiceClient(connection).ListImages(ctx, &runtimeapi.ListImagesRequest{})
		if err == nil {
			return connection, nil
		}
		if time.Since(began) > 20*time.Second {
			_ = connection.Close()
			return nil, fmt.Errorf("the runtime does not answer: %w", err)
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

// waitForSocket spares the first call gRPC's pause of a second after a failure.
func waitForSocket(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		connection, err := net.Dial("unix", path)
		if err == nil {
			return connection.Close()
		}
		if ctxErr := sleep(ctx, 2*time.Millisecond); ctxErr != nil {
			return fmt.Errorf("the runtime does not listen: %w", err)
		}
	}
}
