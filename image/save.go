package image

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/images/archive"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/rootfs"
	"github.com/containerd/containerd/v2/plugins/diff/walking"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// Save writes an image with its tags as a tar archive, an OCI layout that docker
// load reads too. Layers that were kept (KeepLayers) are the registry's bytes. Else the
// layers are archived anew: the same files, but digests, and so an id, of their
// own. Of extended attributes capabilities alone are archived then, as docker save
// does.
func (s *Store) Save(ctx context.Context, refOrID string, w io.Writer) error {
	if err := s.save(s.scope(ctx), refOrID, w); err != nil {
		return fmt.Errorf("save image %s: %w", refOrID, err)
	}
	return nil
}

func (s *Store) save(ctx context.Context, refOrID string, w io.Writer) error {
	image, err := s.Get(refOrID)
	if err != nil {
		return err
	}
	ctx, release, err := s.lease(ctx)
	if err != nil {
		return err
	}
	defer release()
	manifest, whole, err := s.keptManifest(ctx, image.ID)
	if err != nil {
		return err
	}
	if !whole {
		archived, err := s.archiveLayers(ctx, image.ChainID)
		if err != nil {
			return err
		}
		if manifest, err = s.writeManifest(ctx, image.ID, archived); err != nil {
			return err
		}
	}
	return archive.Export(ctx, s.engine.content, w, archive.WithManifest(manifest, image.RepoTags...))
}

// keptManifest is the manifest as it came, and whether all of its layers are kept. A
// layer that was unpacked without being kept is not fetched again for another image.
func (s *Store) keptManifest(ctx context.Context, id string) (desc ocispec.Descriptor, whole bool, err error) {
	if desc, _, err = s.targetOf(ctx, id); err != nil {
		return desc, false, err
	}
	if desc, err = s.manifestOf(ctx, desc, nodePlatform()); err != nil {
		return desc, false, err
	}
	info, err := s.engine.content.Info(ctx, desc.Digest)
	if err != nil {
		return desc, false, err
	}
	// The collection may take layers without a label at any moment.
	kept := 0
	for label, layer := range info.Labels {
		if !strings.HasPrefix(label, "containerd.io/gc.ref.content.l.") {
			continue
		}
		_, err := s.engine.content.Info(ctx, digest.Digest(layer))
		if errdefs.IsNotFound(err) {
			return desc, false, nil
		}
		if err != nil {
			return desc, false, err
		}
		kept++
	}
	return desc, kept > 0, nil
}

// archiveLayers archives the layers of a chain, the bottom one first. Views and
// blobs are the lease's: should this process be killed, they go with it.
func (s *Store) archiveLayers(ctx context.Context, chain string) (archived []ocispec.Descriptor, err error) {
	differ := walking.NewWalkingDiff(s.engine.content)
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

// mountsDir is where snapshots are mounted while they are unpacked or archived.
func (s *Store) mountsDir() string { return filepath.Join(s.dir, "mounts") }

// dropMounts unmounts what a killed predecessor was at.
func (s *Store) dropMounts() error {
	if err := mount.SetTempMountLocation(s.mountsDir()); err != nil {
		return err
	}
	failed, err := mount.CleanupTempMounts(unix.MNT_DETACH)
	return errors.Join(append(failed, err)...)
}

// writeManifest stores the image's configuration with the layers as they are
// archived, and a manifest of both.
func (s *Store) writeManifest(ctx context.Context, id string, archived []ocispec.Descriptor) (desc ocispec.Descriptor, err error) {
	config, err := s.configurationWith(ctx, id, archived)
	if err != nil {
		return desc, err
	}
	manifest := ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, Layers: archived,
		Config: describe(ocispec.MediaTypeImageConfig, config),
	}
	data, err := json.Marshal(manifest)
	if err != nil {
		return desc, err
	}
	desc = describe(ocispec.MediaTypeImageManifest, data)
	for _, blob := range []struct {
		desc ocispec.Descriptor
		data []byte
	}{{manifest.Config, config}, {desc, data}} {
		if err := content.WriteBlob(ctx, s.engine.content, "save-"+rand.Text(), bytes.NewReader(blob.data), blob.desc); err != nil {
			return desc, err
		}
	}
	return desc, nil
}

// configurationWith replaces the layers in a configuration and keeps the rest,
// known to this program or not.
func (s *Store) configurationWith(ctx context.Context, id string, archived []ocispec.Descriptor) ([]byte, error) {
	data, err := s.readConfigurationOf(ctx, id)
	if err != nil {
		return nil, err
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(data, &fields); err != nil {
		return nil, fmt.Errorf("configuration %s: %w", id, err)
	}
	root := ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{}}
	for _, layer := range archived {
		root.DiffIDs = append(root.DiffIDs, layer.Digest)
	}
	if fields["rootfs"], err = json.Marshal(root); err != nil {
		return nil, err
	}
	return json.Marshal(fields)
}

func describe(mediaType string, data []byte) ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(data), Size: int64(len(data))}
}
