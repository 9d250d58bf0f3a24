package image

import (
	"context"
	"encoding/json"

	"github.com/opencontainers/go-digest"
)

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
