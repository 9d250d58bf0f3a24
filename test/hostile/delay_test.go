//go:build !vm

package hostile

import "time"

// delay is what a call in another pod may take longer because of an attack.
const delay = 2 * time.Second
