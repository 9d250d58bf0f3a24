package image

import (
	"fmt"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"pgregory.net/rapid"
)

// TestCatalogFollowsItsRecords compares the catalog with the plainest model of
// it, a map from names to ids, over random pulls and removals.
func TestCatalogFollowsItsRecords(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c, model := newCatalog(nil), map[string]string{}
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			name := fmt.Sprintf("docker.io/library/i%d:1", rapid.IntRange(0, 4).Draw(t, "name"))
			if rapid.Bool().Draw(t, "remove") {
				c.remove(name)
				delete(model, name)
			} else {
				id := digest.FromString(fmt.Sprint(rapid.IntRange(0, 3).Draw(t, "image"))).String()
				c.put(digest.FromString("target of "+id), body{id: id}, time.Now(), name)
				model[name] = id
			}
			checkCatalog(t, c, model)
		}
	})
}

func checkCatalog(t *rapid.T, c *catalog, model map[string]string) {
	names, ids := 0, map[string]bool{}
	for _, i := range c.list() {
		names += len(i.RepoTags)
		ids[i.ID] = true
	}
	want := map[string]bool{}
	for name, id := range model {
		want[id] = true
		if got, err := c.find(name); err != nil || got.ID != id {
			t.Fatalf("%s is %q, want %q: %v", name, got.ID, id, err)
		}
	}
	if names != len(model) || len(ids) != len(want) || len(c.bodies) != len(want) {
		t.Fatalf("%d names of %d images, %d bodies; want %d of %d", names, len(ids), len(c.bodies), len(model), len(want))
	}
	for i := range 4 {
		id := digest.FromString(fmt.Sprint(i)).String()
		if _, err := c.find(id[:20]); errdefs.IsNotFound(err) == want[id] {
			t.Fatalf("find %s: %v, recorded: %v", id[:20], err, want[id])
		}
	}
}

func TestParseReference(t *testing.T) {
	hash := "sha256:" + digest.FromString("x").Encoded()
	for text, want := range map[string]string{
		"busybox":                          "docker.io/library/busybox:latest",
		"busybox:1":                        "docker.io/library/busybox:1",
		"team/app":                         "docker.io/team/app:latest",
		"index.docker.io/library/busybox":  "docker.io/library/busybox:latest",
		"localhost/app":                    "localhost/app:latest",
		"registry.example:5000/a/b:c":      "registry.example:5000/a/b:c",
		"app@" + hash:                      "docker.io/library/app@" + hash,
		"registry.example/app:tag@" + hash: "registry.example/app@" + hash,
	} {
		if ref, err := ParseReference(text); err != nil || ref.String() != want {
			t.Errorf("%s is %s, want %s: %v", text, ref, want, err)
		}
	}
	for _, text := range []string{"", "library/UPPER", "a b", "app@sha256:short", "../x", "https://registry.example/app", "app:"} {
		if ref, err := ParseReference(text); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q is %s: %v", text, ref, err)
		}
	}
}

// FuzzParseReference: what was parsed is stable, and an id is never mistaken.
func FuzzParseReference(f *testing.F) {
	for _, seed := range []string{"busybox", "a/b:c@sha256:00", "deadbeef", "[::1]:5000/x"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		ref, err := ParseReference(text)
		if err != nil {
			return
		}
		if again, err := ParseReference(ref.String()); err != nil || again != ref {
			t.Errorf("%q is %q, which is %q: %v", text, ref, again, err)
		}
	})
}
