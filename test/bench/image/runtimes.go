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

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/server"
)

// contender is a runtime under test.
type contender struct {
	name  string
	start func(ctx context.Context, dir string) (*child, error)
}

func contenders() []contender {
	return []contender{
		{"minicri", func(ctx context.Context, dir string) (*child, error) {
			return startSelf(ctx, "-role=serve", "-at="+dir)
		}},
		{"containerd", startContainerd},
		{"minicri-nosync", func(ctx context.Context, dir string) (*child, error) {
			return startSelf(ctx, "-role=serve", "-at="+dir, "-nosync")
		}},
	}
}

const socketName = "cri.sock"

// serveImages is a child: this runtime's image service, as the daemon has it.
func serveImages(ctx context.Context, dir string, noSync bool) error {
	store, err := image.Open(ctx, image.Config{Root: dir, NoSync: noSync})
	if err != nil {
		return err
	}
	defer store.Close()
	listener, err := net.Listen("unix", filepath.Join(dir, socketName))
	if err != nil {
		return err
	}
	service := grpc.NewServer()
	runtimeapi.RegisterImageServiceServer(service, server.NewImageServer(store))
	stop := context.AfterFunc(ctx, service.Stop)
	defer stop()
	return service.Serve(listener)
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
