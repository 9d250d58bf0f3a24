package image

import (
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

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
