//go:build vm

package hostile

import "time"

// delay is what a call in another pod may take longer because of an attack, where system
// calls take ten times as long as on a node and more.
const delay = 10 * time.Second
