package image

import (
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
)

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
