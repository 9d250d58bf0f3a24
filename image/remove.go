package image

import (
	"context"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
)

// Remove removes an image: given by any of its names or its id, all of its names
// go, as the CRI has it (RemoveImage: "all tags"). Its files are collected in the
// background; containers that run from it keep theirs. An image that is not there
// is removed already. That the configuration pins one is a word to the kubelet's
// collection, not to who asks for its removal: the API has it so.
func (s *Store) Remove(ctx context.Context, refOrID string) error {
	found, err := s.catalog.find(refOrID)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return s.removeNames(ctx, s.catalog.namesOf(found.ID))
}

// Untag removes one name of an image, and the image with its last one. A
// repository's digest goes with the repository's last tag for it. A name that is
// not there is removed already.
func (s *Store) Untag(ctx context.Context, reference string) error {
	ref, err := ParseReference(reference)
	if err != nil {
		return err
	}
	return s.removeNames(ctx, s.catalog.withLastDigest(ref))
}

// Tag gives an image one more name, which another image loses if it has it.
func (s *Store) Tag(ctx context.Context, refOrID, name string) (Image, error) {
	ref, err := ParseReference(name)
	if err != nil {
		return Image{}, err
	}
	if ref.Digest != "" {
		return Image{}, fmt.Errorf("tag %s: a name with a digest is given by a pull: %w", name, errdefs.ErrInvalidArgument)
	}
	found, err := s.catalog.find(refOrID)
	if err != nil {
		return Image{}, err
	}
	ctx = s.scope(ctx)
	target, b, err := s.targetOf(ctx, found.ID)
	if err != nil {
		return Image{}, fmt.Errorf("tag %s as %s: %w", refOrID, ref, err)
	}
	if err := s.record(ctx, recorded{target: target, body: b, names: []string{ref.String()}}); err != nil {
		return Image{}, err
	}
	return s.Get(b.id)
}

// removeNames removes all of the names or none.
func (s *Store) removeNames(ctx context.Context, names []string) error {
	err := s.update(s.scope(ctx), func(ctx context.Context) error {
		for _, name := range names {
			if err := s.images.Delete(ctx, name); err != nil && !errdefs.IsNotFound(err) {
				return fmt.Errorf("remove image %s: %w", name, err)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	s.catalog.remove(names...)
	s.collector.soon()
	return nil
}

// withLastDigest returns the name if it is known, and the repository's digest for
// it when no other tag of the repository points there.
func (c *catalog) withLastDigest(ref Reference) []string {
	c.mu.RLock()
	wanted, known := c.records[ref.String()]
	c.mu.RUnlock()
	if !known {
		return nil
	}
	names := c.namesWhere(func(name string, r record) bool {
		other, ok := splitRecord(name)
		return ok && other.Repository == ref.Repository && r.target == wanted.target
	})
	tags := 0
	for _, name := range names {
		if !strings.Contains(name, "@") {
			tags++
		}
	}
	if tags > 1 || ref.Digest != "" {
		return []string{ref.String()}
	}
	return names
}
