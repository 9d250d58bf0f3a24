package image

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/images/archive"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Import reads a tar archive as docker save or an OCI layout writes it, also
// compressed, and returns the images in it, complete and durable: all of them, with
// all of their names, or none. An image without a name is known by its id. Verifiers
// are not asked: an archive is brought by the node's administrator.
func (s *Store) Import(ctx context.Context, file io.Reader) ([]Image, error) {
	imported, err := s.importAll(s.scope(ctx), file)
	if err != nil {
		return nil, fmt.Errorf("import images: %w", err)
	}
	return imported, nil
}

func (s *Store) importAll(ctx context.Context, file io.Reader) ([]Image, error) {
	ctx, release, err := s.lease(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	manifests, err := s.readArchive(ctx, file)
	if err != nil {
		return nil, err
	}
	all, err := s.unpackArchive(ctx, manifests)
	if err != nil {
		return nil, err
	}
	if err := s.record(ctx, all...); err != nil {
		return nil, err
	}
	imported := make([]Image, len(all))
	for i, one := range all {
		if imported[i], err = s.Get(one.body.id); err != nil {
			return nil, err
		}
	}
	return imported, nil
}

// unpackArchive unpacks each image once, of how many names it may be.
func (s *Store) unpackArchive(ctx context.Context, manifests []ocispec.Descriptor) (all []recorded, err error) {
	at := map[digest.Digest]int{}
	for _, target := range manifests {
		i, seen := at[target.Digest]
		if !seen {
			i, at[target.Digest] = len(all), len(all)
			if err := s.unpackImported(ctx, target); err != nil {
				return nil, err
			}
			body, err := s.readBody(ctx, target)
			if err != nil {
				return nil, err
			}
			all = append(all, recorded{target: target, body: body})
		}
		name := nameInArchive(target)
		if name == "" {
			name = target.Digest.String()
		}
		all[i].names = append(all[i].names, name)
	}
	return all, nil
}

// readArchive stores the blobs, each under the digest of its bytes, and returns
// what the archive's index lists.
func (s *Store) readArchive(ctx context.Context, file io.Reader) ([]ocispec.Descriptor, error) {
	plain, err := decompress(ctx, file, s.zstd)
	if err != nil {
		return nil, fmt.Errorf("read archive: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	defer plain.Close()
	target, err := archive.ImportIndex(ctx, s.engine.content, plain)
	if err != nil {
		return nil, fmt.Errorf("read archive: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	data, err := content.ReadBlob(ctx, s.engine.content, target)
	if err != nil {
		return nil, fmt.Errorf("read index of the archive: %w", err)
	}
	var index ocispec.Index
	if err := json.Unmarshal(data, &index); err != nil {
		return nil, fmt.Errorf("read index of the archive: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	if len(index.Manifests) == 0 {
		return nil, fmt.Errorf("the archive holds no image: %w", errdefs.ErrInvalidArgument)
	}
	return index.Manifests, nil
}

func (s *Store) unpackImported(ctx context.Context, target ocispec.Descriptor) error {
	return s.unpackTree(ctx, target, route{
		platform: nodePlatform(), get: s.present, report: func(Progress) {},
		locks: s.locks.forPull(newMeter(s.config.waitWindow)),
	})
}

// present stands where a pull fetches: an archive's blobs are there, or it is
// broken.
func (s *Store) present(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
	if err := checkDescriptor(desc); err != nil {
		return nil, err
	}
	if _, err := s.engine.content.Info(ctx, desc.Digest); err != nil {
		return nil, fmt.Errorf("the archive lacks %s %s: %w: %w", kindOf(desc), desc.Digest, err, errdefs.ErrInvalidArgument)
	}
	return nil, nil
}

// nameInArchive takes the full name where there is one; the annotation of the
// OCI layout is often the tag alone, which names no image.
func nameInArchive(target ocispec.Descriptor) string {
	if ref, err := ParseReference(target.Annotations[images.AnnotationImageName]); err == nil {
		return ref.String()
	}
	if ref, full := splitRecord(target.Annotations[ocispec.AnnotationRefName]); full {
		return ref.String()
	}
	return ""
}
