package image

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Image is one image of the node. It is a copy: later pulls and removals do not
// change it.
type Image struct {
	ID          string   // the digest of the configuration, sha256:<hex>
	RepoTags    []string // sorted, as RepoDigests are
	RepoDigests []string
	// Size is what the image takes on the disk in bytes, unpacked; layers that
	// it shares with others count in full.
	Size     int64
	Pinned   bool   // must not be removed to make room
	UserText string // the user and perhaps the group, each by name or number, as the author wrote it
	// Spec is the rest of the configuration, without its history. Only Get and Prepare
	// read it, from the disk.
	Spec    ocispec.Image
	ChainID string        // names the snapshot of the topmost layer; empty without layers
	Target  digest.Digest // of the manifest or index that the image's newest record points at

	target ocispec.Descriptor
	names  []string // of all records, also of those without a repository
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

// ParseReference normalises what people write: busybox is
// docker.io/library/busybox:latest. Of a name with both a tag and a digest the
// digest counts. Anything else is an ErrInvalidArgument.
func ParseReference(text string) (reference.Named, error) {
	named, err := reference.ParseDockerRef(text)
	if err != nil {
		return nil, fmt.Errorf("image reference %q: %w: %w", text, err, errdefs.ErrInvalidArgument)
	}
	return named, nil
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
