package runtime

import "testing"

// A supervisor that was upgraded has the pid of its predecessor, and knows no more which
// ids that gave: the shim refuses one that it has already.
func TestExecIDsAreGivenOnce(t *testing.T) {
	given := make(map[string]bool)
	for range 10000 {
		id := newExecID()
		if given[id] {
			t.Fatalf("%s is given twice", id)
		}
		given[id] = true
	}
}
