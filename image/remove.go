package image

import (
	"context"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
)

// Remove takes records away: by id all of the image's, by tag that tag, by
// digest all of that repository's names for the digest. The digest of a
// repository goes with its last tag. What nothing names any more is collected in
// the background; containers that run from it keep their files. An image that is
// not there is removed already.
func (s *Store) Remove(ctx context.Context, refOrID string) error {
	names, err := s.recordsOf(refOrID)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx = s.scope(ctx)
	for _, name := range names {
		if err := s.images.Delete(ctx, name); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("remove image %s: %w", name, err)
		}
		s.catalog.remove(name)
	}
	s.collector.soon()
	return nil
}

func (s *Store) recordsOf(refOrID string) ([]string, error) {
	id, err := s.catalog.resolve(refOrID)
	if err != nil {
		return nil, err
	}
	ref, named := s.catalog.recordNamed(refOrID)
	if !named {
		return s.catalog.namesOf(id), nil
	}
	if ref.Digest != "" {
		return s.catalog.namesIn(ref.Repository, ref.Digest), nil
	}
	return s.catalog.withLastDigest(ref), nil
}

// recordNamed tells a reference from an id.
func (c *catalog) recordNamed(refOrID string) (Reference, bool) {
	ref, err := ParseReference(refOrID)
	if err != nil {
		return ref, false
	}
	if prefix, ok := isIDPrefix(refOrID); ok {
		if id, _ := c.lockedByPrefix(prefix); id != "" {
			return ref, false
		}
	}
	return ref, true
}

func (c *catalog) lockedByPrefix(prefix string) (string, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.byPrefix(prefix)
}

// namesIn returns a repository's names for a target.
func (c *catalog) namesIn(repository string, target digest.Digest) []string {
	c.mu.RLock()
	defer c.mu.RUnlock()
	var names []string
	for name, r := range c.records {
		if ref, ok := splitRecord(name); ok && ref.Repository == repository && r.target == target {
			names = append(names, name)
		}
	}
	return names
}

// withLastDigest returns the tag, and the repository's digest for it when no
// other tag of the repository points there.
func (c *catalog) withLastDigest(ref Reference) []string {
	c.mu.RLock()
	target := c.records[ref.String()].target
	c.mu.RUnlock()
	names := c.namesIn(ref.Repository, target)
	tags := 0
	for _, name := range names {
		if !strings.Contains(name, "@") {
			tags++
		}
	}
	if tags > 1 {
		return []string{ref.String()}
	}
	return names
}
