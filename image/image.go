package image

import (
	"strconv"
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
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
