package id

import (
	"testing"

	"github.com/containerd/errdefs"
)

func TestNewIsNeverTheSame(t *testing.T) {
	seen := make(map[string]bool)
	for range 1000 {
		id := New()
		if len(id) != 64 || seen[id] {
			t.Fatalf("%q", id)
		}
		seen[id] = true
	}
}

func TestFind(t *testing.T) {
	things := map[string]int{"abc1": 1, "abc2": 2, "abd": 3, "hidden": -1, "ab": 4}
	listed := func(n int) bool { return n > 0 }
	for _, test := range []struct {
		id   string
		want int
		is   func(error) bool
	}{
		{"abc1", 1, nil},
		{"abd", 3, nil},
		{"ab", 4, nil}, // exact, though it is the start of others
		{"abc", 0, errdefs.IsInvalidArgument},
		{"", 0, errdefs.IsInvalidArgument},
		{"x", 0, errdefs.IsNotFound},
		{"hidden", 0, errdefs.IsNotFound},
		{"hid", 0, errdefs.IsNotFound},
	} {
		got, err := Find(things, "thing", test.id, listed)
		if got != test.want || (test.is == nil) != (err == nil) || err != nil && !test.is(err) {
			t.Errorf("Find(%q) = %d, %v", test.id, got, err)
		}
	}
}
