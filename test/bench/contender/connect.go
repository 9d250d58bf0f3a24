package contender

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// patience is how long a runtime may take to be ready.
const patience = 20 * time.Second

// Connect waits until the runtime of a directory answers, and returns a
// connection to it.
func Connect(ctx context.Context, dir string) (*grpc.ClientConn, error) {
	if err := waitForSocket(ctx, filepath.Join(dir, socketName)); err != nil {
		return nil, err
	}
	connection, err := grpc.NewClient("unix://"+filepath.Join(dir, socketName), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	err = until(ctx, func() error {
		_, err := runtimeapi.NewImageServiceClient(connection).ListImages(ctx, &runtimeapi.ListImagesRequest{})
		return err
	})
	if err != nil {
		_ = connection.Close()
		return nil, fmt.Errorf("the runtime does not answer: %w", err)
	}
	return connection, nil
}

// waitForSocket spares the first call gRPC's pause of a second after a failure.
func waitForSocket(ctx context.Context, path string) error {
	err := until(ctx, func() error {
		connection, err := net.Dial("unix", path)
		if err != nil {
			return err
		}
		return connection.Close()
	})
	if err != nil {
		return fmt.Errorf("the runtime does not listen: %w", err)
	}
	return nil
}

// until tries again until there is no error.
func until(ctx context.Context, try func() error) error {
	for began := time.Now(); ; {
		err := try()
		if err == nil || time.Since(began) > patience {
			return err
		}
		if ctxErr := sleep(ctx, 2*time.Millisecond); ctxErr != nil {
			return fmt.Errorf("%w: %w", ctxErr, err)
		}
	}
}
