package image

import (
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"github.com/minicri/minicri/test/harness"
)

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
		ref, err := ParseReference(text)
		harness.Want(t, err == nil && ref.String() == want, "%s is %s, want %s: %v", text, ref, want, err)
	}
	for _, text := range []string{"", "library/UPPER", "a b", "app@sha256:short", "../x", "https://registry.example/app", "app:"} {
		ref, err := ParseReference(text)
		harness.Want(t, errdefs.IsInvalidArgument(err), "%q is %s: %v", text, ref, err)
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
		again, err := ParseReference(ref.String())
		harness.Want(t, err == nil && again == ref, "%q is %q, which is %q: %v", text, ref, again, err)
	})
}
