package image

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// List returns the node's images, sorted by id.
func (s *Store) List() []Image { return s.catalog.list() }

// Get finds an image by reference, id or an unambiguous beginning of its id.
// One that is not there is an ErrNotFound.
func (s *Store) Get(refOrID string) (Image, error) { return s.catalog.find(refOrID) }

// loadCatalog reads all records. An image that is not whole is not listed, so
// that it is pulled again, which mends it.
func (s *Store) loadCatalog(ctx context.Context) error {
	all, err := s.images.List(ctx)
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	for _, r := range all {
		b, err := s.readBody(ctx, r.Target)
		if err != nil {
			s.log.Warn("image is not whole; pull it again", "image", r.Name, "error", err)
			continue
		}
		s.catalog.put(r.Target.Digest, b, r.UpdatedAt, r.Name)
	}
	return nil
}

// readBody reads the configuration behind a target and checks that its layers
// are unpacked.
func (s *Store) readBody(ctx context.Context, target ocispec.Descriptor) (body, error) {
	manifest, err := images.Manifest(ctx, s.engine.content, target, nodePlatform())
	if err != nil {
		return body{}, fmt.Errorf("read manifest of %s: %w", target.Digest, err)
	}
	b := body{id: manifest.Config.Digest.String(), size: target.Size + manifest.Config.Size}
	if b.spec, err = s.readSpec(ctx, manifest.Config); err != nil {
		return body{}, err
	}
	b.chain = identity.ChainID(b.spec.RootFS.DiffIDs).String()
	size, err := s.chainSize(ctx, b.chain)
	if err != nil {
		return body{}, err
	}
	b.size += size
	return b, nil
}

func (s *Store) readSpec(ctx context.Context, config ocispec.Descriptor) (spec ocispec.Image, err error) {
	data, err := content.ReadBlob(ctx, s.engine.content, config)
	if err != nil {
		return spec, fmt.Errorf("read configuration %s: %w", config.Digest, err)
	}
	if err := json.Unmarshal(data, &spec); err != nil {
		return spec, fmt.Errorf("read configuration %s: %w: %w", config.Digest, err, errdefs.ErrDataLoss)
	}
	return spec, nil
}

// chainSize adds up the unpacked layers from the topmost down.
func (s *Store) chainSize(ctx context.Context, chain string) (size int64, err error) {
	for chain != "" {
		info, err := s.snapshots.Stat(ctx, chain)
		if err != nil {
			return 0, fmt.Errorf("unpacked layer %s: %w", chain, err)
		}
		usage, err := s.snapshots.Usage(ctx, chain)
		if err != nil {
			return 0, fmt.Errorf("size of unpacked layer %s: %w", chain, err)
		}
		size += usage.Size
		chain = info.Parent
	}
	return size, nil
}

// record makes an image exist: from here on it is listed and kept, also over a
// power cut.
func (s *Store) record(ctx context.Context, target ocispec.Descriptor, names ...string) (Image, error) {
	b, err := s.readBody(ctx, target)
	if err != nil {
		return Image{}, err
	}
	for _, name := range names {
		if err := s.writeRecord(ctx, name, target); err != nil {
			return Image{}, fmt.Errorf("record image %s: %w", name, err)
		}
	}
	s.catalog.put(target.Digest, b, time.Now(), names...)
	return s.catalog.find(b.id)
}

func (s *Store) writeRecord(ctx context.Context, name string, target ocispec.Descriptor) error {
	r := images.Image{Name: name, Target: target}
	_, err := s.images.Create(ctx, r)
	if errdefs.IsAlreadyExists(err) {
		_, err = s.images.Update(ctx, r, "target")
	}
	return err
}
