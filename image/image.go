package image

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/selinux/go-selinux/label"
)

// Image is one image of the node. It is a copy: later pulls and removals do not
// change it.
type Image struct {
	// ID is the digest of the image's configuration, sha256:<hex>.
	ID string
	// RepoTags and RepoDigests are its references, sorted.
	RepoTags    []string
	RepoDigests []string
	// Size is what the image takes on the disk in bytes, unpacked; layers that
	// it shares with others count in full.
	Size int64
	// Pinned images must not be removed to make room.
	Pinned bool
	// UserText is the configuration's user as its author wrote it: name or
	// number, of a user and perhaps of a group.
	UserText string
	// Spec is the rest of the configuration: environment, entrypoint, command,
	// working directory, stop signal, volumes, labels and platform. Only Get and
	// Prepare read it, from the disk; its history is left out.
	Spec ocispec.Image
	// ChainID names the snapshot of the topmost layer; empty without layers.
	ChainID string
	// Target is the digest of the manifest or index that the newest record of
	// the image points at.
	Target digest.Digest
}

// User splits the configuration's user, dropping the group: a number is returned
// as uid, anything else as a name. No user means uid 0, as a container would run.
func (i Image) User() (uid *int64, name string) {
	user, _, _ := strings.Cut(i.UserText, ":")
	if user == "" {
		user = "0"
	}
	if n, err := strconv.ParseInt(user, 10, 64); err == nil {
		return &n, ""
	}
	return nil, user
}

// Reference is a normalised image name: with a registry, and with either a tag
// or a digest.
type Reference struct {
	Repository string        // docker.io/library/busybox
	Tag        string        // latest; empty with a digest
	Digest     digest.Digest // empty with a tag
}

// ParseReference normalises what people write: busybox is
// docker.io/library/busybox:latest. Of a name with both a tag and a digest the
// digest counts. Anything else is an ErrInvalidArgument.
func ParseReference(text string) (Reference, error) {
	named, err := reference.ParseDockerRef(text)
	if err != nil {
		return Reference{}, fmt.Errorf("image reference %q: %w: %w", text, err, errdefs.ErrInvalidArgument)
	}
	ref := Reference{Repository: named.Name()}
	if pinned, ok := named.(reference.Digested); ok {
		ref.Digest = pinned.Digest()
		return ref, nil
	}
	if tagged, ok := named.(reference.Tagged); ok {
		ref.Tag = tagged.Tag()
	}
	return ref, nil
}

// String is the reference as it is recorded and shown.
func (r Reference) String() string {
	if r.Digest != "" {
		return r.Repository + "@" + r.Digest.String()
	}
	return r.Repository + ":" + r.Tag
}

// Host is the registry's name: docker.io, or host[:port].
func (r Reference) Host() string {
	host, _, _ := strings.Cut(r.Repository, "/")
	return host
}

// pinnedTo is the same repository at the digest that a registry resolved.
func (r Reference) pinnedTo(target digest.Digest) Reference {
	return Reference{Repository: r.Repository, Digest: target}
}

// splitRecord reads a record's name back. Records of images that were imported
// without a name are digests and have no repository.
func splitRecord(name string) (ref Reference, ok bool) {
	ref, err := ParseReference(name)
	return ref, err == nil && ref.String() == name
}

// idLength is the length of an image id in hex.
const idLength = 64

// isIDPrefix reports whether text can be an image id or the beginning of one:
// sha256:<hex> or at least 7 digits of hex, which no one types as a name.
func isIDPrefix(text string) (prefix string, ok bool) {
	prefix, full := strings.CutPrefix(text, "sha256:")
	if !full && len(prefix) < 7 {
		return "", false
	}
	return prefix, prefix != "" && len(prefix) <= idLength && strings.Trim(prefix, "0123456789abcdef") == ""
}

// nodePlatform orders the manifests of an index: the node's own platform first,
// then what its processor also runs (linux/arm/v7 on arm64).
func nodePlatform() platforms.MatchComparer { return orUnnamed{platforms.Default()} }

// orUnnamed also takes images whose author named no platform, as images built by
// hand often are.
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

// Description is all that is known of an image, for people.
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
	found, err := s.catalog.find(refOrID)
	if err != nil {
		return Description{}, err
	}
	spec, err := s.readConfigurationOf(s.scope(ctx), found.ID)
	if err != nil {
		return Description{}, err
	}
	return Description{
		ID: found.ID, RepoTags: found.RepoTags, RepoDigests: found.RepoDigests, Size: found.Size, Pinned: found.Pinned,
		ChainID: found.ChainID, Target: found.Target, ImageSpec: spec,
	}, nil
}

// labelMounts gives what is mounted the SELinux label, unless it is "". Only a file
// system can be mounted with a label of its own (mount(8), context): a single layer,
// which the snapshotter binds, keeps the label that it has on the disk, and no
// container may read it.
func (s *Store) labelMounts(mounts []mount.Mount, selinux string) error {
	if selinux == "" {
		return nil
	}
	for i, m := range mounts {
		if m.Type == "bind" && slices.Contains(m.Options, "rw") {
			// The snapshot of an image without layers: the container's own directory.
			if err := label.SetFileLabel(m.Source, selinux); err != nil {
				return err
			}
			continue
		}
		if m.Type == "bind" {
			m = overlayOf(m, filepath.Join(s.dir, emptyDir))
		}
		m.Options = append(slices.Clone(m.Options), label.FormatMountLabel("", selinux))
		mounts[i] = m
	}
	return nil
}

// emptyDir is an empty directory of the store, a layer below.
const emptyDir = "empty"

// overlayOf is the overlay that shows what a read-only bind does. Without a layer to
// write to it has to have two (Documentation/filesystems/overlayfs.rst); the
// directory's own mode and owner are those of the first.
func overlayOf(bind mount.Mount, empty string) mount.Mount {
	options := slices.DeleteFunc(slices.Clone(bind.Options), func(option string) bool { return option == "rbind" || option == "bind" })
	return mount.Mount{Type: "overlay", Source: "overlay", Options: append(options, "lowerdir="+bind.Source+":"+empty)}
}
