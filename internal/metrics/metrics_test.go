package metrics

import "testing"

// A file system that counts no inodes, as procfs and btrfs, has no number of free ones:
// 0 would be an alert for ever.
func TestInodesThatAreNotCounted(t *testing.T) {
	for root, want := range map[string]bool{"/proc": false, t.TempDir(): true} {
		seen := map[string]bool{}
		disk(root, func(name string, _ float64, _ ...string) { seen[name] = true })
		if seen[inodesFree] != want || !seen[diskSize] {
			t.Errorf("%s: %v", root, seen)
		}
	}
}
