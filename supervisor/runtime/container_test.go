package runtime

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// Containers of a program that are removed at the same moment leave none of its
// directories: whichever is the last removes them.
func TestRemoveStateOfContainersAtOnce(t *testing.T) {
	for range 200 {
		root := filepath.Join(t.TempDir(), "runc")
		var removals sync.WaitGroup
		ids := []string{"one", "two", "three"}
		for _, id := range ids {
			if err := errors.Join(os.MkdirAll(filepath.Join(root, id), 0o700), os.MkdirAll(filepath.Join(root, ProgramStates, id), 0o700)); err != nil {
				t.Fatal(err)
			}
		}
		for _, id := range ids {
			removals.Go(func() {
				if err := RemoveState(filepath.Join(root, id), nil, "", false); err != nil {
					t.Error(err)
				}
			})
		}
		removals.Wait()
		if _, err := os.Stat(root); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("the program's directory is left: %v", err)
		}
	}
}
