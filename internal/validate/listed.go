package validate

import (
	"fmt"

	"github.com/containerd/errdefs"
)

// mostListed bounds what all pods together, and all containers together, may take
// in a list without their labels and annotations, which a list leaves out where it
// would be too long. The kubelet reads a list as one message of at most 16 MiB, and
// a list that is longer is none: it takes the node for dead. The statistics of pods
// name those of containers too, so that each kind has less than half of it.
const mostListed = 7 << 20

// Listed refuses a pod or a container, as kind says, that would make their list too
// long. used are the bytes of all that are there, more those of this one.
func Listed(kind string, count, used, more int) error {
	if used+more <= mostListed {
		return nil
	}
	return fmt.Errorf("config.metadata, config.image: this %s takes %d bytes in the list of all, the %d that are there take %d, and more than %d together do not fit into one message: remove some, or give it shorter names: %w",
		kind, more, count, used, mostListed, errdefs.ErrResourceExhausted)
}
