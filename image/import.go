package image

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/images/archive"
	"github.com/containerd/containerd/v2/pkg/archive/compression"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Import reads a tar archive as docker save or an OCI layout writes it, also
// compressed, and returns the images in it, complete and durable. An image
// without a name is known by its id. Verifiers are not asked: an archive is
// brought by the node's administrator.
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
	var imported []Image
	for _, manifest := range manifests {
		image, err := s.importOne(ctx, manifest)
		if err != nil {
			return nil, err
		}
		imported = append(imported, image)
	}
	return imported, nil
}

// readArchive stores the blobs, each under the digest of its bytes, and returns
// what the archive's index lists.
func (s *Store) readArchive(ctx context.Context, file io.Reader) ([]ocispec.Descriptor, error) {
	plain, err := compression.DecompressStream(file)
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

func (s *Store) importOne(ctx context.Context, target ocispec.Descriptor) (Image, error) {
	tree := tree{
		platform: nodePlatform(), get: s.present, report: func(Progress) {},
		locks: s.locks.forPull(newMeter(s.config.waitWindow)),
	}
	if err := s.unpackTree(ctx, target, tree); err != nil {
		return Image{}, err
	}
	name := nameInArchive(target)
	if name == "" {
		name = target.Digest.String()
	}
	return s.record(ctx, target, name)
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
	for _, key := range []string{images.AnnotationImageName, ocispec.AnnotationRefName} {
		if name := target.Annotations[key]; name != "" && (key == images.AnnotationImageName || isFullName(name)) {
			if ref, err := ParseReference(name); err == nil {
				return ref.String()
			}
		}
	}
	return ""
}

func isFullName(name string) bool {
	_, full := splitRecord(name)
	return full
}
