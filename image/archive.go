package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/images/archive"
	"github.com/containerd/containerd/v2/pkg/rootfs"
	"github.com/containerd/containerd/v2/plugins/diff/walking"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Import makes all images of a tar archive, a docker save or an OCI layout, complete and
// durable, or none. It asks no verifiers: the node's administrator brings the archive.
func (s *Store) Import(ctx context.Context, file io.Reader) (_ []Image, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("import images: %w", err)
		}
	}()
	ctx, release, err := s.lease(s.scope(ctx))
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
	for i, one := range all {
		if all[i], err = s.Get(one.ID); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// readArchive stores the blobs and returns what the archive's index lists.
func (s *Store) readArchive(ctx context.Context, file io.Reader) ([]ocispec.Descriptor, error) {
	plain, err := decompress(ctx, file, &place{places: s.zstd})
	if err != nil {
		return nil, fmt.Errorf("read archive: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	defer plain.Close()
	target, err := archive.ImportIndex(ctx, s.content, plain)
	if errors.Is(err, tar.ErrHeader) {
		return nil, fmt.Errorf("read archive: it is no tar archive, plain or packed by gzip or zstd: give one that docker save or skopeo (oci-archive:) has written: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	if err != nil {
		return nil, fmt.Errorf("read archive: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	data, err := content.ReadBlob(ctx, s.content, target)
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

// unpackArchive unpacks each image once, however many names it has.
func (s *Store) unpackArchive(ctx context.Context, manifests []ocispec.Descriptor) (all []Image, err error) {
	for _, target := range s.forThisNode(ctx, manifests) {
		i := slices.IndexFunc(all, func(one Image) bool { return one.target.Digest == target.Digest })
		if i < 0 {
			manifest, err := s.unpackTree(ctx, target, s.archived())
			if err != nil {
				return nil, err
			}
			image, err := s.fromContent(ctx, target, manifest)
			if err != nil {
				return nil, err
			}
			i, all = len(all), append(all, image)
		}
		all[i].names = append(all[i].names, nameInArchive(target))
	}
	return all, nil
}

// forThisNode leaves out what an archive has for other platforms, where it has an image for the node under the same name
// or, of images without a name, any. An archive for another platform alone is imported as a pull takes one.
func (s *Store) forThisNode(ctx context.Context, all []ocispec.Descriptor) (chosen []ocispec.Descriptor) {
	node, best, platform := nodePlatform(), map[string]int{}, make([]*ocispec.Platform, len(all))
	nameOf := func(i int) string {
		if name := nameInArchive(all[i]); name != all[i].Digest.String() {
			return name
		}
		return ""
	}
	matches := func(i int) bool { return platform[i] == nil || node.Match(*platform[i]) }
	for i := range all {
		platform[i] = s.platformOf(ctx, all[i])
		known, is := best[nameOf(i)]
		if matches(i) && (!is || platform[i] != nil && platform[known] != nil && node.Less(*platform[i], *platform[known])) {
			best[nameOf(i)] = i
		}
	}
	for i, one := range all {
		found, is := best[nameOf(i)]
		if !is || all[found].Digest == one.Digest || nameOf(i) == "" && matches(i) {
			chosen = append(chosen, one)
		}
	}
	return chosen
}

// platformOf is what an archive says of a manifest, or its configuration; nil if neither does.
func (s *Store) platformOf(ctx context.Context, desc ocispec.Descriptor) *ocispec.Platform {
	if desc.Platform != nil || !images.IsManifestType(desc.MediaType) {
		return desc.Platform
	}
	var manifest ocispec.Manifest
	data, err := content.ReadBlob(ctx, s.content, desc)
	if err != nil || json.Unmarshal(data, &manifest) != nil {
		return nil // which its walk reports
	}
	platform, err := images.ConfigPlatform(ctx, s.content, manifest.Config)
	if err != nil {
		return nil
	}
	return &platform
}

// archived is the route through an image whose blobs must be in the store.
func (s *Store) archived() route {
	present := func(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		if err := checkDescriptor(desc); err != nil {
			return nil, err
		}
		if _, err := s.content.Info(ctx, desc.Digest); err != nil {
			return nil, fmt.Errorf("the archive lacks %s %s: %w: %w", kindOf(desc), desc.Digest, err, errdefs.ErrInvalidArgument)
		}
		return nil, nil
	}
	unreported := func(ocispec.Descriptor, Stage, int64) {}
	return route{platform: nodePlatform(), get: present, locks: s.locks.forPull(s.config.waitWindow), report: unreported}
}

// nameInArchive prefers the full name: the OCI layout's annotation is often a tag alone,
// which names no image. An image without a name is recorded under its digest.
func nameInArchive(target ocispec.Descriptor) string {
	if ref, err := ParseReference(target.Annotations[images.AnnotationImageName]); err == nil {
		return ref.String()
	}
	name := target.Annotations[ocispec.AnnotationRefName]
	if ref, err := ParseReference(name); err == nil && ref.String() == name {
		return name
	}
	return target.Digest.String()
}

// Save writes an image with its tags as an OCI layout in a tar archive, which docker load reads too. Layers that were
// not kept (KeepLayers) are archived anew: with the same files, but other digests and so another id, and with no
// extended attributes but capabilities, as docker save does.
func (s *Store) Save(ctx context.Context, refOrID string, w io.Writer) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("save image %s: %w", refOrID, err)
		}
	}()
	image, config, err := s.read(ctx, refOrID)
	if err != nil {
		return err
	}
	ctx, release, err := s.lease(s.scope(ctx))
	if err != nil {
		return err
	}
	defer release()
	manifest, err := s.manifestOf(ctx, image.target, s.archived())
	if err != nil {
		return err
	}
	kept, err := s.layersKept(ctx, manifest)
	if err != nil {
		return err
	}
	if !kept {
		layers, err := s.archiveLayers(ctx, image.ChainID)
		if err != nil {
			return err
		}
		if manifest, err = s.writeManifest(ctx, config, layers); err != nil {
			return err
		}
	}
	return archive.Export(ctx, s.content, w, archive.WithManifest(manifest, image.RepoTags...))
}

// layersKept reports whether all layers of a manifest are there and labelled, so that no collection takes them.
func (s *Store) layersKept(ctx context.Context, manifest ocispec.Descriptor) (bool, error) {
	info, err := s.content.Info(ctx, manifest.Digest)
	if err != nil {
		return false, err
	}
	kept := false
	for label, layer := range info.Labels {
		if !strings.HasPrefix(label, "containerd.io/gc.ref.content.l.") {
			continue
		}
		_, err := s.content.Info(ctx, digest.Digest(layer))
		if errdefs.IsNotFound(err) { // unpacked for another image without being kept
			return false, nil
		}
		if err != nil {
			return false, err
		}
		kept = true
	}
	return kept, nil
}

// archiveLayers archives the layers of a chain, the bottom one first. The lease holds
// the views and blobs, so that they go with it if this process is killed.
func (s *Store) archiveLayers(ctx context.Context, chain string) (archived []ocispec.Descriptor, err error) {
	differ := walking.NewWalkingDiff(s.content)
	for chain != "" {
		info, err := s.snapshots.Stat(ctx, chain)
		if err != nil {
			return nil, err
		}
		layer, err := rootfs.CreateDiff(ctx, chain, s.snapshots, differ, diff.WithMediaType(ocispec.MediaTypeImageLayer))
		if err != nil {
			return nil, fmt.Errorf("archive layer %s: %w", chain, err)
		}
		archived = append(archived, layer)
		chain = info.Parent
	}
	slices.Reverse(archived)
	return archived, nil
}

// writeManifest stores the configuration with the layers as they are archived, and a
// manifest of both. Unknown fields of the configuration stay.
func (s *Store) writeManifest(ctx context.Context, config []byte, archived []ocispec.Descriptor) (desc ocispec.Descriptor, err error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(config, &fields); err != nil {
		return desc, fmt.Errorf("configuration: %w", err)
	}
	root := ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{}}
	for _, layer := range archived {
		root.DiffIDs = append(root.DiffIDs, layer.Digest)
	}
	if fields["rootfs"], err = json.Marshal(root); err != nil {
		return desc, err
	}
	manifest := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, Layers: archived}
	if manifest.Config, err = s.writeJSON(ctx, ocispec.MediaTypeImageConfig, fields); err != nil {
		return desc, err
	}
	return s.writeJSON(ctx, ocispec.MediaTypeImageManifest, manifest)
}

func (s *Store) writeJSON(ctx context.Context, mediaType string, value any) (ocispec.Descriptor, error) {
	data, err := json.Marshal(value)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	desc := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(data), Size: int64(len(data))}
	return desc, content.WriteBlob(ctx, s.content, "save-"+rand.Text(), bytes.NewReader(data), desc)
}
