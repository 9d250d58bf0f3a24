package spdy

import (
	"testing"
	"time"
)

// Small frames wait, large ones do not.
func TestPace(t *testing.T) {
	const frames = 4096
	took := func(bytes int) time.Duration {
		var pace Pace
		began := time.Now()
		for range frames {
			pace.Took(bytes)
		}
		return time.Since(began)
	}
	small, least := took(4), frames/burst*burstTime-2*burstTime
	if small < least {
		t.Errorf("%d small frames took %v, less than %v", frames, small, least)
	}
	if large := took(32 << 10); large > small/2 {
		t.Errorf("%d large frames took %v, small ones %v", frames, large, small)
	}
}
