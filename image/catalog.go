package image

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
)

// catalog is the index of complete images in memory, so that listing a thousand
// of them reads no file. The database is the truth; the catalog follows it.
type catalog struct {
	pinned map[string]bool

	mu      sync.RWMutex // guards what follows, and pinned
	records map[string]record
	bodies  map[digest.Digest]body // by target
}

// record is a name and what it points at.
type record struct {
	target  digest.Digest
	updated time.Time
}

// body is what is kept in memory of a target's configuration: some hundred
// bytes, however large that is.
type body struct {
	id    string
	size  int64
	user  string // at most maxUser
	chain string
}

func newCatalog(pinned []string) *catalog {
	c := &catalog{
		records: map[string]record{},
		bodies:  map[digest.Digest]body{},
	}
	c.pin(pinned)
	return c
}

// pin has these references pinned, and no others.
func (c *catalog) pin(references []string) {
	pinned := make(map[string]bool)
	for _, text := range references {
		if ref, err := ParseReference(text); err == nil {
			pinned[ref.String()] = true
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pinned = pinned
}

// put records names for a target whose body is known.
func (c *catalog) put(target digest.Digest, b body, updated time.Time, names ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bodies[target] = b
	moved := false
	for _, name := range names {
		before, known := c.records[name]
		moved = moved || known && before.target != target
		c.records[name] = record{target: target, updated: updated}
	}
	if moved {
		c.dropBodies()
	}
}

func (c *catalog) remove(names ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range names {
		delete(c.records, name)
	}
	c.dropBodies()
}

// dropBodies forgets targets without a record. Called with mu held.
func (c *catalog) dropBodies() {
	used := make(map[digest.Digest]bool, len(c.bodies))
	for _, r := range c.records {
		used[r.target] = true
	}
	for target := range c.bodies {
		if !used[target] {
			delete(c.bodies, target)
		}
	}
}

// list returns all images, sorted by id.
func (c *catalog) list() []Image {
	c.mu.RLock()
	defer c.mu.RUnlock()
	byID := make(map[string]int, len(c.bodies))
	all := make([]Image, 0, len(c.bodies))
	newest := make([]time.Time, 0, len(c.bodies))
	for name, r := range c.records {
		b := c.bodies[r.target]
		at, seen := byID[b.id]
		if !seen {
			at = len(all)
			byID[b.id] = at
			all = append(all, Image{ID: b.id, Size: b.size, UserText: b.user, ChainID: b.chain})
			newest = append(newest, time.Time{})
		}
		c.addName(&all[at], name)
		if !r.updated.Before(newest[at]) {
			newest[at], all[at].Target = r.updated, r.target
		}
	}
	for i := range all {
		slices.Sort(all[i].RepoTags)
		slices.Sort(all[i].RepoDigests)
	}
	slices.SortFunc(all, func(a, b Image) int { return cmp.Compare(a.ID, b.ID) })
	return all
}

func (c *catalog) addName(image *Image, name string) {
	image.Pinned = image.Pinned || c.pinned[name]
	switch {
	case strings.Contains(name, "@"):
		image.RepoDigests = append(image.RepoDigests, name)
	case strings.Contains(name, "/"):
		image.RepoTags = append(image.RepoTags, name)
	}
}

// find resolves a reference, an id or the beginning of an id.
func (c *catalog) find(refOrID string) (Image, error) {
	id, err := c.resolve(refOrID)
	if err != nil {
		return Image{}, err
	}
	all := c.list()
	at := slices.IndexFunc(all, func(image Image) bool { return image.ID == id })
	if at < 0 {
		return Image{}, notFound(refOrID)
	}
	return all[at], nil
}

func (c *catalog) resolve(refOrID string) (id string, err error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if prefix, ok := isIDPrefix(refOrID); ok {
		if id, err := c.byPrefix(prefix); id != "" || err != nil {
			return id, err
		}
		if len(prefix) == idLength {
			return "", notFound(refOrID) // no name looks so
		}
	}
	ref, err := ParseReference(refOrID)
	if err != nil {
		return "", err
	}
	r, ok := c.records[ref.String()]
	if !ok {
		return "", notFound(refOrID)
	}
	return c.bodies[r.target].id, nil
}

// byPrefix returns "" when no id begins so, and an error when several do.
func (c *catalog) byPrefix(prefix string) (id string, err error) {
	for _, b := range c.bodies {
		if !strings.HasPrefix(b.id, "sha256:"+prefix) || b.id == id {
			continue
		}
		if id != "" {
			return "", fmt.Errorf("image id %s is ambiguous: %w", prefix, errdefs.ErrInvalidArgument)
		}
		id = b.id
	}
	return id, nil
}

// namesOf returns the names of all records of an image.
func (c *catalog) namesOf(id string) []string {
	return c.namesWhere(func(_ string, r record) bool { return c.bodies[r.target].id == id })
}

func (c *catalog) namesWhere(match func(name string, r record) bool) []string {
	c.mu.RLock()
	defer c.mu.RUnlock()
	var names []string
	for name, r := range c.records {
		if match(name, r) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func notFound(refOrID string) error {
	return fmt.Errorf("image %q: %w", refOrID, errdefs.ErrNotFound)
}
