package image

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/imageverifier/bindir"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

const (
	maxManifest = 4 << 20 // bytes; registries refuse more (distribution-spec, "Pushing Manifests")
	maxConfig   = 4 << 20 // bytes, as other runtimes take
	maxDepth    = 8       // of indexes within each other
	maxLayers   = 256     // the options of mount(2) are 4 KiB, of which a layer takes up to 12 bytes
	maxUser     = 2 * 256 // LOGIN_NAME_MAX, for a user and a group
)

// vetter refuses what this node cannot run before its layers are fetched. The unpacker
// would skip a foreign platform silently and notice the rest late or not at all.
type vetter struct {
	store    *Store
	route    route
	indexes  atomic.Int32                     // seen; one manifest of each is followed, so this is the depth
	listed   atomic.Bool                      // whether an index has chosen the manifest by its platform
	manifest atomic.Pointer[ocispec.Manifest] // nil before it was seen
}

func (s *Store) vetter(route route) *vetter { return &vetter{store: s, route: route} }

// vet is a handler of images.Dispatch that finds no children.
func (v *vetter) vet(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
	switch {
	case images.IsIndexType(desc.MediaType):
		return nil, v.vetIndex(ctx, desc)
	case images.IsManifestType(desc.MediaType):
		return nil, v.vetManifest(ctx, desc)
	case images.IsConfigType(desc.MediaType):
		return nil, v.vetConfig(ctx, desc)
	}
	return nil, nil
}

func (v *vetter) vetIndex(ctx context.Context, desc ocispec.Descriptor) error {
	if v.indexes.Add(1) > maxDepth {
		return fmt.Errorf("indexes are nested more than %d deep: %w", maxDepth, errdefs.ErrInvalidArgument)
	}
	var index ocispec.Index
	data, err := content.ReadBlob(ctx, v.store.content, desc)
	if err == nil {
		index, err = parseIndex(data)
	}
	if err != nil {
		return fmt.Errorf("index %s: %w", desc.Digest, err)
	}
	var others []string
	for _, one := range index.Manifests {
		if one.Platform == nil || v.route.platform.Match(*one.Platform) {
			return nil
		}
		if name := platforms.FormatAll(*one.Platform); one.Platform.OS != "unknown" && !slices.Contains(others, name) { // no attestation
			others = append(others, name)
		}
	}
	if len(others) == 0 {
		return fmt.Errorf("index %s: it lists no image: %w", desc.Digest, errdefs.ErrNotFound)
	}
	return v.foreign(strings.Join(others, ", "))
}

// foreign is the error of an image that is for other platforms alone.
func (v *vetter) foreign(others string) error {
	wanted := cmp.Or(v.route.wanted, "this node, a "+platforms.FormatAll(ownPlatform()))
	return kindError{fmt.Sprintf("the image is for %s, not for %s", cut(others, maxWords), wanted), errPlatform}
}

// parseIndex refuses an index that another reader would take for a manifest.
func parseIndex(data []byte) (ocispec.Index, error) {
	var index struct {
		ocispec.Index
		Config, Layers any
	}
	if err := json.Unmarshal(data, &index); err != nil {
		return index.Index, fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	if index.Config != nil || index.Layers != nil || images.IsManifestType(index.MediaType) {
		return index.Index, fmt.Errorf("it is a manifest, of type %q, not an index: %w", cut(index.MediaType, 100), errdefs.ErrInvalidArgument)
	}
	return index.Index, nil
}

func (v *vetter) vetManifest(ctx context.Context, desc ocispec.Descriptor) error {
	var manifest ocispec.Manifest
	data, err := content.ReadBlob(ctx, v.store.content, desc)
	if err == nil {
		manifest, err = parseManifest(data, desc.MediaType)
	}
	if err != nil {
		return fmt.Errorf("manifest %s: %w", desc.Digest, err)
	}
	v.listed.Store(desc.Platform != nil && desc.Platform.OS != "" && desc.Platform.Architecture != "")
	v.manifest.Store(&manifest)
	return nil
}

// parseManifest decodes a manifest and refuses one whose image cannot be pulled, unpacked
// and mounted. Most artifacts have an empty configuration (image-spec, manifest.md,
// "Guidelines for Artifact Usage"): as images they would all be the same one.
func parseManifest(data []byte, mediaType string) (manifest ocispec.Manifest, err error) {
	var index struct{ Manifests, FSLayers any }
	if err := errors.Join(json.Unmarshal(data, &manifest), json.Unmarshal(data, &index)); err != nil {
		return manifest, fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	if isDockerConfig(mediaType, manifest.Config.MediaType) {
		manifest.Config.MediaType = images.MediaTypeDockerSchema2Config
	}
	config := manifest.Config
	switch {
	case index.FSLayers != nil:
		return manifest, fmt.Errorf("it is an image of Docker's schema 1, which is not supported: %w", errdefs.ErrNotImplemented)
	case index.Manifests != nil || images.IsIndexType(manifest.MediaType):
		return manifest, fmt.Errorf("it is an index, of type %q, not a manifest: %w", cut(manifest.MediaType, 100), errdefs.ErrInvalidArgument)
	case !images.IsConfigType(config.MediaType) || config.Digest == ocispec.DescriptorEmptyJSON.Digest:
		kind := cut(cmp.Or(manifest.ArtifactType, config.MediaType), 100)
		return manifest, fmt.Errorf("it is an artifact of type %q, not an image: %w", kind, errdefs.ErrInvalidArgument)
	case len(manifest.Layers) > maxLayers:
		return manifest, fmt.Errorf("the image has %d layers; no more than %d can be mounted: %w", len(manifest.Layers), maxLayers, errdefs.ErrInvalidArgument)
	}
	if err := checkDescriptor(config); err != nil {
		return manifest, err
	}
	for _, layer := range manifest.Layers {
		if err := errors.Join(checkLayerType(layer.MediaType), checkDescriptor(layer)); err != nil {
			return manifest, err
		}
	}
	return manifest, nil
}

// isDockerConfig reports a type by which builders have called the configuration of an image of Docker's schema 2, and
// that Docker takes for one (distribution/distribution#1621, moby/moby#22378).
func isDockerConfig(manifestType, configType string) bool {
	return manifestType == images.MediaTypeDockerSchema2Manifest && slices.Contains([]string{"application/octet-stream", "application/json", "text/html", ""}, configType)
}

// layerTypes are the types of layers that are unpacked. One that may not be distributed is fetched like any other, where
// the registry has it all the same.
var layerTypes = []string{
	ocispec.MediaTypeImageLayer, ocispec.MediaTypeImageLayerGzip, ocispec.MediaTypeImageLayerZstd,
	ocispec.MediaTypeImageLayerNonDistributable, ocispec.MediaTypeImageLayerNonDistributableGzip, ocispec.MediaTypeImageLayerNonDistributableZstd, //nolint:staticcheck // images have them
	images.MediaTypeDockerSchema2Layer, images.MediaTypeDockerSchema2LayerGzip, images.MediaTypeDockerSchema2LayerZstd,
	images.MediaTypeDockerSchema2LayerForeign, images.MediaTypeDockerSchema2LayerForeignGzip,
}

func checkLayerType(kind string) error {
	text := ""
	switch {
	case slices.Contains(layerTypes, kind):
		return nil
	case strings.HasSuffix(kind, "+encrypted"):
		text = "an encrypted layer (%q); encrypted images are not supported: %w"
	default:
		text = "a layer of the unknown type %q: %w"
	}
	return fmt.Errorf("it has "+text, cut(kind, 100), errdefs.ErrNotImplemented)
}

// checkDescriptor checks what a manifest says of a blob before a request's path is made of it.
func checkDescriptor(desc ocispec.Descriptor) error {
	if err := desc.Digest.Validate(); err != nil {
		return fmt.Errorf("digest %q of a %s: %w: %w", cut(desc.Digest.String(), 100), kindOf(desc), err, errdefs.ErrInvalidArgument)
	}
	if err := checkAlgorithm(desc.Digest); err != nil {
		return fmt.Errorf("%s: %w", kindOf(desc), err)
	}
	most := int64(maxManifest)
	switch {
	case images.IsLayerType(desc.MediaType):
		most = 1 << 62
	case images.IsConfigType(desc.MediaType):
		most = maxConfig
	}
	if desc.Size <= 0 || desc.Size > most {
		return fmt.Errorf("%s %s has a size of %d bytes, which is not between 1 and %d: %w", kindOf(desc), desc.Digest, desc.Size, most, errdefs.ErrInvalidArgument)
	}
	return nil
}

// checkAlgorithm wants sha256, as in ids, snapshots and the content store's labels.
func checkAlgorithm(d digest.Digest) error {
	if algorithm := d.Algorithm(); algorithm != digest.SHA256 {
		return fmt.Errorf("%s digests are not supported, only sha256 ones: %w", algorithm, errdefs.ErrNotImplemented)
	}
	return nil
}

func (v *vetter) vetConfig(ctx context.Context, desc ocispec.Descriptor) error {
	spec, err := readConfiguration(ctx, v.store.content, desc)
	if err != nil {
		return err
	}
	if err := v.vetPlatform(spec.Platform); err != nil {
		return err
	}
	if kind := spec.RootFS.Type; kind != "" && kind != "layers" { // image-spec, config.md
		return fmt.Errorf("the configuration's rootfs is of type %q, not layers: %w", cut(kind, 100), errdefs.ErrInvalidArgument)
	}
	var layers []ocispec.Descriptor
	if manifest := v.manifest.Load(); manifest != nil {
		layers = manifest.Layers
	}
	if len(spec.RootFS.DiffIDs) != len(layers) {
		return fmt.Errorf("the configuration names %d layers, the manifest %d: %w", len(spec.RootFS.DiffIDs), len(layers), errdefs.ErrInvalidArgument)
	}
	if len(spec.Config.User) > maxUser {
		return fmt.Errorf("the configuration's user has %d characters, more than %d: %w", len(spec.Config.User), maxUser, errdefs.ErrInvalidArgument)
	}
	return v.store.checkRoom(ctx, layers, spec.RootFS.DiffIDs)
}

// vetPlatform compares the platform of a configuration. The entry of an index counts for more: configurations of
// cross-built images often have the builder's platform. Without an index the node accepts all but Windows, as other
// runtimes do: the builder's platform may be wrong, the programs may be scripts, or the node may have an emulator.
func (v *vetter) vetPlatform(platform ocispec.Platform) error {
	if v.listed.Load() || v.route.platform.Match(platform) {
		return nil
	}
	if v.route.wanted == "" && v.indexes.Load() == 0 && platform.OS != "windows" {
		v.store.log.Warn("the image is for another platform: its programs may need an emulator", "image", platforms.FormatAll(platform), "node", platforms.FormatAll(ownPlatform()))
		return nil
	}
	return v.foreign(platforms.FormatAll(platform))
}

// configuration leaves out the history, which can be most of it.
type configuration struct {
	ocispec.Platform
	Config ocispec.ImageConfig `json:"config"`
	RootFS ocispec.RootFS      `json:"rootfs"`
}

func readConfiguration(ctx context.Context, provider content.Provider, desc ocispec.Descriptor) (spec configuration, err error) {
	data, err := content.ReadBlob(ctx, provider, desc)
	if err != nil {
		return spec, fmt.Errorf("read configuration %s: %w", desc.Digest, err)
	}
	if spec, err = parseConfiguration(data); err != nil {
		return spec, fmt.Errorf("configuration %s: %w", desc.Digest, err)
	}
	return spec, nil
}

func parseConfiguration(data []byte) (spec configuration, err error) {
	if err := json.Unmarshal(data, &spec); err != nil {
		return spec, fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
	}
	for _, id := range spec.RootFS.DiffIDs {
		if err := id.Validate(); err != nil {
			return spec, fmt.Errorf("layer %q: %w: %w", cut(id.String(), 100), err, errdefs.ErrInvalidArgument)
		}
	}
	return spec, nil
}

// verify asks every executable of the verifier directory by containerd's bindir protocol
// (docs/image-verification.md). A configured directory that is missing or empty is a no.
func (s *Store) verify(ctx context.Context, ref reference.Named, target ocispec.Descriptor) error {
	dir := s.settings().VerifierDir
	if there, err := verifiers(dir); err != nil || !there {
		return err
	}
	config := &bindir.Config{BinDir: dir, MaxVerifiers: -1} // all of them
	setDuration(&config.PerVerifierTimeout, s.settings().VerifierTimeout)
	judgement, err := bindir.NewImageVerifier(config).VerifyImage(ctx, ref.String(), target)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrVerification, err)
	}
	if !judgement.OK {
		return fmt.Errorf("%w: %s", ErrVerification, judgement.Reason)
	}
	return nil
}

// verifiers reports whether images are verified, and fails where that cannot be done.
func verifiers(dir string) (there bool, err error) {
	if dir == "" {
		return false, nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false, fmt.Errorf("%w: read verifiers (images.verifier_dir): %w", ErrVerification, err)
	}
	if len(entries) == 0 {
		return false, fmt.Errorf("%w: no verifier in %s (images.verifier_dir)", ErrVerification, dir)
	}
	return true, nil
}

// setDuration sets a field whose type has a name that is internal to its module.
func setDuration[T ~int64](field *T, d time.Duration) { *field = T(d) }
