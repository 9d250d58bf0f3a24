package image

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/metadata/boltutil"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	bolt "go.etcd.io/bbolt"
)

// Image is a copy: later pulls and removals do not change it.
type Image struct {
	ID          string   // the digest of the configuration, sha256:<hex>
	RepoTags    []string // sorted, as RepoDigests are
	RepoDigests []string
	Size        int64         // bytes, unpacked; shared layers count in full
	Pinned      bool          // must not be removed to make room
	UserText    string        // the user and perhaps the group, as the author wrote it
	Spec        ocispec.Image // the configuration without its history; only Get reads it
	ChainID     string        // names the snapshot of the topmost layer; empty without layers
	Target      digest.Digest // of the manifest or index that the newest record points at

	target ocispec.Descriptor
	names  []string // of all records, also of those without a repository
}

// User returns the user's number as uid, or its name. Without a user it is uid 0.
func (i Image) User() (uid *int64, name string) {
	user, _, _ := strings.Cut(i.UserText, ":")
	if n, err := strconv.ParseInt(cmp.Or(user, "0"), 10, 64); err == nil {
		return &n, ""
	}
	return nil, user
}

// ParseReference normalises a name: busybox is docker.io/library/busybox:latest. A digest
// replaces a tag. Errors are ErrInvalidArgument.
func ParseReference(text string) (reference.Named, error) {
	named, err := reference.ParseDockerRef(text)
	if err != nil {
		return nil, fmt.Errorf("image reference %q: %w: %w", text, err, errdefs.ErrInvalidArgument)
	}
	return named, nil
}

const idLength = 64 // of an image id in hex

// isIDPrefix reports whether text can begin an image id: sha256:<hex>, or 7 digits of
// hex, which no one types as a name.
func isIDPrefix(text string) (prefix string, ok bool) {
	prefix, full := strings.CutPrefix(text, "sha256:")
	if !full && len(prefix) < 7 {
		return "", false
	}
	return prefix, prefix != "" && len(prefix) <= idLength && strings.Trim(prefix, "0123456789abcdef") == ""
}

// nodePlatform orders the manifests of an index: the best that the node's processor runs first (linux/amd64/v3, v2,
// none), then those of older processors (linux/386, linux/arm/v7 on arm64).
func nodePlatform() platforms.MatchComparer { return orUnnamed{platforms.Only(ownPlatform())} }

// ownPlatform is the node's, with the variant of an amd64 processor, which the library leaves out.
func ownPlatform() ocispec.Platform {
	own := platforms.DefaultSpec()
	if own.Architecture == "amd64" {
		data, _ := os.ReadFile("/proc/cpuinfo") // without it the first variant
		own.Variant = variantOf(data)
	}
	return own
}

// variantOf returns the microarchitecture level that an amd64 processor has all features of, by the names of Linux
// (x86-64 psABI, 3.1.1; arch/x86/include/asm/cpufeatures.h); "" is the first.
func variantOf(cpuinfo []byte) string {
	_, line, _ := bytes.Cut(cpuinfo, []byte("\nflags"))
	line, _, _ = bytes.Cut(line, []byte("\n"))
	flags := strings.Fields(string(line))
	variant := ""
	for _, level := range []struct{ name, features string }{
		{"v2", "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"},
		{"v3", "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"},
		{"v4", "avx512f avx512bw avx512cd avx512dq avx512vl"},
	} {
		for _, feature := range strings.Fields(level.features) {
			if !slices.Contains(flags, feature) {
				return variant
			}
		}
		variant = level.name
	}
	return variant
}

// orUnnamed also takes images without a platform, as images built by hand often are.
type orUnnamed struct{ platforms.MatchComparer }

func (m orUnnamed) Match(p ocispec.Platform) bool {
	return p.OS == "" || p.Architecture == "" || m.MatchComparer.Match(p)
}

// platformNamed is the node's for "", and else exactly the one that is named.
func platformNamed(text string) (platforms.MatchComparer, error) {
	if text == "" {
		return nodePlatform(), nil
	}
	named, err := platforms.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("platform %q: %w: %w", text, err, errdefs.ErrInvalidArgument)
	}
	return platforms.OnlyStrict(named), nil
}

// List returns the node's images, sorted by id, without their Spec.
func (s *Store) List() []Image {
	all := slices.Clone(*s.list.Load())
	for i := range all {
		s.pin(&all[i])
	}
	return all
}

func (s *Store) pin(image *Image) {
	pinned := s.settings().pinned
	image.Pinned = slices.ContainsFunc(image.names, func(name string) bool { return pinned[name] })
}

// Get finds an image by reference, id or an unambiguous beginning of its id, with its
// Spec. It returns an ErrNotFound also for a damaged image, which a pull repairs.
func (s *Store) Get(refOrID string) (Image, error) {
	found, data, err := s.read(context.Background(), refOrID)
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

func (s *Store) read(ctx context.Context, refOrID string) (found Image, data []byte, err error) {
	if found, err = s.find(refOrID); err != nil {
		return found, nil, err
	}
	data, err = content.ReadBlob(s.scope(ctx), s.content, ocispec.Descriptor{Digest: digest.Digest(found.ID)})
	if err != nil {
		return found, nil, fmt.Errorf("image %s is damaged, pull it again: %w: %w", found.ID, err, errdefs.ErrNotFound)
	}
	return found, data, nil
}

// Description is an image for people to read.
type Description struct {
	ID          string          `json:"id"`
	RepoTags    []string        `json:"repoTags"`
	RepoDigests []string        `json:"repoDigests"`
	Size        int64           `json:"size"` // bytes, unpacked
	Pinned      bool            `json:"pinned"`
	ChainID     string          `json:"chainID"`
	Target      digest.Digest   `json:"target"`
	ImageSpec   json.RawMessage `json:"imageSpec"` // the configuration, as its author wrote it
}

// Describe finds an image as Get does and describes it.
func (s *Store) Describe(ctx context.Context, refOrID string) (Description, error) {
	found, spec, err := s.read(ctx, refOrID)
	if err != nil {
		return Description{}, err
	}
	return Description{
		ID: found.ID, RepoTags: found.RepoTags, RepoDigests: found.RepoDigests, Size: found.Size, Pinned: found.Pinned,
		ChainID: found.ChainID, Target: found.Target, ImageSpec: spec,
	}, nil
}

// find resolves a reference, an id or the beginning of an id.
func (s *Store) find(refOrID string) (Image, error) {
	all, at := *s.list.Load(), -1
	prefix, isID := isIDPrefix(refOrID)
	if isID {
		begins := func(image Image) bool { return strings.HasPrefix(image.ID, "sha256:"+prefix) }
		at = slices.IndexFunc(all, begins)
		if at >= 0 && slices.ContainsFunc(all[at+1:], begins) {
			return Image{}, fmt.Errorf("image id %s is ambiguous: %w", prefix, errdefs.ErrInvalidArgument)
		}
	}
	if at < 0 && (!isID || len(prefix) < idLength) { // no name is a whole id
		ref, err := ParseReference(refOrID)
		if err != nil {
			return Image{}, err
		}
		at = slices.IndexFunc(all, func(image Image) bool { return slices.Contains(image.names, ref.String()) })
	}
	if at < 0 {
		return Image{}, fmt.Errorf("image %q: %w", refOrID, errdefs.ErrNotFound)
	}
	found := all[at]
	s.pin(&found)
	return found, nil
}

// The labels of a record, so that the start reads no file.
const (
	labelID    = "minicri/id"
	labelSize  = "minicri/size"
	labelUser  = "minicri/user"
	labelChain = "minicri/chain"
)

// readRecords reads all records into the list, without images that lack something: a
// pull repairs them. Called with changing held, or before anybody else uses the store.
func (s *Store) readRecords(ctx context.Context) error {
	records, err := s.images.List(ctx)
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	slices.SortFunc(records, func(a, b images.Image) int { return a.UpdatedAt.Compare(b.UpdatedAt) })
	byID := map[string]*Image{}
	for _, r := range records {
		image, err := s.fromRecord(ctx, r)
		if err != nil {
			s.log.Warn("an image is incomplete: pull it again", "image", r.Name, "error", err)
			continue
		}
		if known := byID[image.ID]; known != nil {
			image.names, image.RepoTags, image.RepoDigests = known.names, known.RepoTags, known.RepoDigests
		}
		image.names = append(image.names, r.Name)
		switch {
		case strings.Contains(r.Name, "@"):
			image.RepoDigests = append(image.RepoDigests, r.Name)
		case strings.Contains(r.Name, "/"):
			image.RepoTags = append(image.RepoTags, r.Name)
		}
		byID[image.ID] = &image
	}
	all := make([]Image, 0, len(byID))
	for _, image := range byID {
		slices.Sort(image.RepoTags)
		slices.Sort(image.RepoDigests)
		all = append(all, *image)
	}
	slices.SortFunc(all, func(a, b Image) int { return cmp.Compare(a.ID, b.ID) })
	s.list.Store(&all)
	return nil
}

// fromRecord takes an image from its record's labels and checks that its parts are there.
func (s *Store) fromRecord(ctx context.Context, r images.Image) (Image, error) {
	image := Image{ID: r.Labels[labelID], UserText: r.Labels[labelUser], ChainID: r.Labels[labelChain], Target: r.Target.Digest, target: r.Target}
	size, err := strconv.ParseInt(r.Labels[labelSize], 10, 64)
	if image.ID == "" || err != nil {
		return image, fmt.Errorf("its record says neither %s nor %s", labelID, labelSize)
	}
	image.Size = size
	for _, blob := range []digest.Digest{r.Target.Digest, digest.Digest(image.ID)} {
		if _, err := s.content.Info(ctx, blob); err != nil {
			return image, fmt.Errorf("find blob %s: %w", blob, err)
		}
	}
	if image.ChainID != "" {
		if _, err := s.snapshots.Stat(ctx, image.ChainID); err != nil {
			return image, fmt.Errorf("find unpacked layer %s: %w", image.ChainID, err)
		}
	}
	return image, nil
}

// fromContent reads the configuration of a target's manifest and checks that its layers are unpacked.
func (s *Store) fromContent(ctx context.Context, target ocispec.Descriptor, manifest ocispec.Manifest) (Image, error) {
	spec, err := readConfiguration(ctx, s.content, manifest.Config)
	if err != nil {
		return Image{}, err
	}
	image := Image{
		ID: manifest.Config.Digest.String(), Size: target.Size + manifest.Config.Size, UserText: cut(spec.Config.User, maxUser),
		ChainID: identity.ChainID(spec.RootFS.DiffIDs).String(), target: target,
	}
	for chain := image.ChainID; chain != ""; {
		info, err := s.snapshots.Stat(ctx, chain)
		if err != nil {
			return Image{}, fmt.Errorf("find unpacked layer %s: %w", chain, err)
		}
		usage, err := s.snapshots.Usage(ctx, chain)
		if err != nil {
			return Image{}, fmt.Errorf("measure unpacked layer %s: %w", chain, err)
		}
		image.Size += usage.Size
		chain = info.Parent
	}
	return image, nil
}

// change runs f as one transaction and reads the records anew.
func (s *Store) change(ctx context.Context, f func(ctx context.Context) error) error {
	ctx = s.scope(ctx)
	if !s.changing.TryAcquire(1) && s.changing.Acquire(ctx, 1) != nil {
		return fmt.Errorf("wait for another change of the image records: %w", context.Cause(ctx))
	}
	defer s.changing.Release(1)
	err := s.db.Update(func(tx *bolt.Tx) error { return f(boltutil.WithTransaction(ctx, tx)) })
	if err != nil {
		return err
	}
	return s.readRecords(context.WithoutCancel(ctx))
}

// record lists and keeps images under their names, all or none, also over a power cut.
func (s *Store) record(ctx context.Context, all ...Image) error {
	return s.change(ctx, func(ctx context.Context) error {
		for _, one := range all {
			if err := s.writeRecords(ctx, one, one.names...); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *Store) writeRecords(ctx context.Context, image Image, names ...string) error {
	for _, name := range names {
		r := images.Image{Name: name, Target: image.target, Labels: map[string]string{
			labelID: image.ID, labelSize: strconv.FormatInt(image.Size, 10), labelUser: image.UserText, labelChain: image.ChainID,
		}}
		_, err := s.images.Create(ctx, r)
		if errdefs.IsAlreadyExists(err) {
			_, err = s.images.Update(ctx, r, "target", "labels")
		}
		if err != nil {
			return fmt.Errorf("record image %s: %w", name, err)
		}
	}
	return nil
}

// Tag gives an image one more name, and takes it from another image.
func (s *Store) Tag(ctx context.Context, refOrID, name string) error {
	ref, err := ParseReference(name)
	if err != nil {
		return err
	}
	if _, pinned := ref.(reference.Digested); pinned {
		return fmt.Errorf("tag %s: a name with a digest is given by a pull: %w", name, errdefs.ErrInvalidArgument)
	}
	return s.change(ctx, func(ctx context.Context) error {
		found, err := s.find(refOrID)
		if err != nil {
			return err
		}
		return s.writeRecords(ctx, found, ref.String())
	})
}

// Remove removes an image with all of its names, pinned or not (CRI, RemoveImage), and returns when its files are
// deleted: the kubelet measures the disk then, and evicts pods if it is still full. If ctx ends first, a collection in
// the background deletes them. Containers of the image keep their files. It is no error if there is no such image.
func (s *Store) Remove(ctx context.Context, refOrID string) error {
	err := s.removeNames(ctx, refOrID, func(image Image) []string { return image.names })
	if err != nil || s.begin() != nil {
		return err
	}
	defer s.work.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	if s.collecting.Acquire(ctx, 1) != nil { // a collection under way may not have seen that the image is gone
		return nil
	}
	defer s.collecting.Release(1)
	if err := s.Collect(ctx); err != nil && ctx.Err() == nil {
		s.log.Error("the files of a removed image stay until the next collection", "image", refOrID, "error", err)
	}
	return nil
}

// Untag removes one name of an image, and the image with its last one. A repository's
// digest goes with its last tag. It is no error if the name is not there.
func (s *Store) Untag(ctx context.Context, reference string) error {
	ref, err := ParseReference(reference)
	if err != nil {
		return err
	}
	return s.removeNames(ctx, ref.String(), func(image Image) []string {
		same := slices.DeleteFunc(slices.Clone(image.names), func(name string) bool {
			other, err := ParseReference(name)
			return err != nil || other.Name() != ref.Name()
		})
		isTag := func(name string) bool { return !strings.Contains(name, "@") }
		others := slices.ContainsFunc(same, func(name string) bool { return isTag(name) && name != ref.String() })
		if others || !isTag(ref.String()) {
			return []string{ref.String()}
		}
		return same
	})
}

func (s *Store) removeNames(ctx context.Context, refOrID string, choose func(Image) []string) error {
	err := s.change(ctx, func(ctx context.Context) error {
		found, err := s.find(refOrID)
		if errdefs.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, name := range choose(found) {
			if err := s.images.Delete(ctx, name); err != nil && !errdefs.IsNotFound(err) {
				return fmt.Errorf("remove image %s: %w", name, err)
			}
		}
		return nil
	})
	s.collectSoon()
	return err
}
