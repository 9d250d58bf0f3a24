package server

import (
	"math"
	"testing"
	"time"
)

// A timeout of any int64 is one: it never overflows into no time at all.
func TestSeconds(t *testing.T) {
	longest := time.Duration(math.MaxInt64).Truncate(time.Second)
	for n, want := range map[int64]time.Duration{
		math.MinInt64: 0, -1: 0, 0: 0, 30: 30 * time.Second, 10_000_000_000: longest, math.MaxInt64: longest,
	} {
		if got := seconds(n); got != want {
			t.Errorf("%d seconds are %v, want %v", n, got, want)
		}
	}
}
