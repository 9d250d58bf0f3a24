package image

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/metadata/boltutil"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	bolt "go.etcd.io/bbolt"
)

// List returns the node's images, sorted by id, without their Spec.
func (s *Store) List() []Image { return s.catalog.list() }

// Get finds an image by reference, id or an unambiguous beginning of its id, with
// its Spec. One that is not there is an ErrNotFound, and so is one whose files
// cannot be read any more: pulling it again repairs it.
func (s *Store) Get(refOrID string) (Image, error) {
	found, err := s.catalog.find(refOrID)
	if err != nil {
		return Image{}, err
	}
	data, err := s.readConfigurationOf(s.scope(context.Background()), found.ID)
	if err != nil {
		return Image{}, err
	}
	spec, err := parseConfiguration(data)
	if err != nil {
		return Image{}, fmt.Errorf("image %s is damaged, pull it again: %w: %w", found.ID, err, errdefs.ErrNotFound)
	}
	found.Spec = ocispec.Image{Platform: spec.Platform, Config: spec.Config, RootFS: spec.RootFS}
	return found, nil
}

func (s *Store) readConfigurationOf(ctx context.Context, id string) ([]byte, error) {
	data, err := content.ReadBlob(ctx, s.engine.content, ocispec.Descriptor{Digest: digest.Digest(id)})
	if err != nil {
		return nil, fmt.Errorf("image %s is damaged, pull it again: %w: %w", id, err, errdefs.ErrNotFound)
	}
	return data, nil
}

// What a record's labels keep of the image, so that the start reads no file.
const (
	labelID    = "minicri/id"
	labelSize  = "minicri/size"
	labelUser  = "minicri/user"
	labelChain = "minicri/chain"
)

func (b body) labels() map[string]string {
	return map[string]string{labelID: b.id, labelSize: strconv.FormatInt(b.size, 10), labelUser: b.user, labelChain: b.chain}
}

// loadCatalog reads all records. An image that is not whole is not listed, so
// that it is pulled again, which repairs it.
func (s *Store) loadCatalog(ctx context.Context) error {
	all, err := s.images.List(ctx)
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	for _, r := range all {
		b, err := s.bodyOf(ctx, r)
		if err != nil {
			s.log.Warn("an image is incomplete: pull it again", "image", r.Name, "error", err)
			continue
		}
		s.catalog.put(r.Target.Digest, b, r.UpdatedAt, r.Name)
	}
	return nil
}

// bodyOf takes an image from its record's labels and checks that what they name
// is there.
func (s *Store) bodyOf(ctx context.Context, r images.Image) (body, error) {
	b := body{id: r.Labels[labelID], user: r.Labels[labelUser], chain: r.Labels[labelChain]}
	size, err := strconv.ParseInt(r.Labels[labelSize], 10, 64)
	if b.id == "" || err != nil {
		return b, fmt.Errorf("its record says neither %s nor %s", labelID, labelSize)
	}
	b.size = size
	for _, blob := range []digest.Digest{r.Target.Digest, digest.Digest(b.id)} {
		if _, err := s.engine.content.Info(ctx, blob); err != nil {
			return b, fmt.Errorf("blob %s: %w", blob, err)
		}
	}
	if b.chain != "" {
		if _, err := s.snapshots.Stat(ctx, b.chain); err != nil {
			return b, fmt.Errorf("unpacked layer %s: %w", b.chain, err)
		}
	}
	return b, nil
}

// readBody reads the configuration behind a target and checks that its layers
// are unpacked.
func (s *Store) readBody(ctx context.Context, target ocispec.Descriptor) (body, error) {
	manifest, err := images.Manifest(ctx, s.engine.content, target, nodePlatform())
	if err != nil {
		return body{}, fmt.Errorf("read manifest of %s: %w", target.Digest, err)
	}
	b := body{id: manifest.Config.Digest.String(), size: target.Size + manifest.Config.Size}
	spec, err := readConfiguration(ctx, s.engine.content, manifest.Config)
	if err != nil {
		return body{}, err
	}
	b.user = cut(spec.Config.User, maxUser)
	b.chain = identity.ChainID(spec.RootFS.DiffIDs).String()
	size, err := s.chainSize(ctx, b.chain)
	if err != nil {
		return body{}, err
	}
	b.size += size
	return b, nil
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

// recorded is an image with the names that it is to have.
type recorded struct {
	target ocispec.Descriptor
	body   body
	names  []string
}

// record makes images exist, all of them or none: from here on they are listed and
// kept, also over a power cut.
func (s *Store) record(ctx context.Context, all ...recorded) error {
	err := s.update(ctx, func(ctx context.Context) error {
		for _, one := range all {
			for _, name := range slices.Sorted(slices.Values(one.names)) {
				if err := s.writeRecord(ctx, name, one.target, one.body); err != nil {
					return fmt.Errorf("record image %s: %w", name, err)
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	now := time.Now()
	for _, one := range all {
		s.catalog.put(one.target.Digest, one.body, now, one.names...)
	}
	return nil
}

// update makes what f does one transaction of the database.
func (s *Store) update(ctx context.Context, f func(ctx context.Context) error) error {
	return s.engine.db.Update(func(tx *bolt.Tx) error { return f(boltutil.WithTransaction(ctx, tx)) })
}

// targetOf finds what the records of an image point at.
func (s *Store) targetOf(ctx context.Context, id string) (target ocispec.Descriptor, b body, err error) {
	for _, name := range s.catalog.namesOf(id) {
		r, err := s.images.Get(ctx, name)
		if errdefs.IsNotFound(err) {
			continue // removed meanwhile
		}
		if err != nil {
			return target, b, err
		}
		b, err = s.bodyOf(ctx, r)
		return r.Target, b, err
	}
	return target, b, notFound(id)
}

func (s *Store) writeRecord(ctx context.Context, name string, target ocispec.Descriptor, b body) error {
	r := images.Image{Name: name, Target: target, Labels: b.labels()}
	_, err := s.images.Create(ctx, r)
	if errdefs.IsAlreadyExists(err) {
		_, err = s.images.Update(ctx, r, "target", "labels")
	}
	return err
}
