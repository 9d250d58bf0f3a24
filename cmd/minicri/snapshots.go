package main

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/doctor"
	"github.com/minicri/minicri/internal/inspect"
)

// snapshotsOf gives access to the writable layers of containers. The image store
// belongs to the daemon while that runs, so it is asked; where none serves, the
// store is opened here, which is refused while another process has it.
func snapshotsOf(ctx context.Context, c *config.Config) doctor.Snapshots {
	if serves, err := daemonServes(ctx, c.Socket); serves || err != nil { // the error comes again
		return daemonSnapshots{inspect.NewClient(inspect.DebugSocket(c.State))}
	}
	return storedSnapshots{imageConfig(c, slog.New(slog.DiscardHandler))}
}

// daemonSnapshots asks a daemon.
type daemonSnapshots struct{ client inspect.Client }

func (d daemonSnapshots) List(ctx context.Context, _ func(id string) bool) (keys []string, err error) {
	err = d.client.JSON(ctx, "/snapshots/orphans", &keys)
	return keys, err
}

func (d daemonSnapshots) Remove(ctx context.Context, key string) error {
	return d.client.Do(ctx, http.MethodDelete, "/snapshots/orphans/"+key)
}

// storedSnapshots are those of a node whose daemon does not run.
type storedSnapshots struct{ config image.Config }

func (s storedSnapshots) List(ctx context.Context, explains func(id string) bool) (keys []string, err error) {
	err = s.open(ctx, image.OpenToLook, func(store *image.Store) error {
		all, err := store.Snapshots(ctx)
		for _, key := range all {
			if !explains(container.OfSnapshot(key)) {
				keys = append(keys, key)
			}
		}
		return err
	})
	return keys, err
}

// Remove does what the daemon's store would do in the background, too: the files
// are gone when it returns.
func (s storedSnapshots) Remove(ctx context.Context, key string) error {
	return s.open(ctx, image.Open, func(store *image.Store) error {
		if err := store.RemoveSnapshot(ctx, key); err != nil {
			return err
		}
		return store.Collect(ctx)
	})
}

// open does something with the store, if there is one: to look at a node makes
// nothing on it.
func (s storedSnapshots) open(ctx context.Context, open func(context.Context, image.Config) (*image.Store, error), do func(*image.Store) error) error {
	if _, err := os.Stat(filepath.Join(s.config.Root, "image", "meta.db")); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	store, err := open(ctx, s.config)
	if err != nil {
		return err
	}
	return errors.Join(do(store), store.Close())
}
