package container

import (
	"context"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
)

// Supervisors run the containers, one supervisor for each build. client.Set implements it.
type Supervisors interface {
	sandbox.Supervisors
	Connect(ctx context.Context, build string) (*client.Client, error)
	Follow(follower client.Follower)
	Groups() ([]string, error)
	Ended(build string) bool
	ExitOf(build, id string) (*api.ExitRecord, error)
	Dir(build string) string
}

// Images are the root file systems of containers. image.Store implements it.
type Images interface {
	Get(ref string) (image.Image, error)
	Prepare(ctx context.Context, key, imageID string, options image.PrepareOptions) error
	Mount(ctx context.Context, key, target, label string) error
	Unmount(target string) error
	Snapshots(ctx context.Context) ([]string, error)
	RemoveSnapshot(ctx context.Context, key string) error
}

// Orphans finds and removes what has no record. sweep.Places implements it.
type Orphans interface {
	Find(owners sweep.Owners) ([]sweep.Orphan, error)
	Remove(orphan sweep.Orphan) error
}
