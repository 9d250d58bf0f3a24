package validate

import (
	"math"
	"testing"
)

func TestBitsPerSecond(t *testing.T) {
	const bad = math.MaxUint64
	for _, test := range []struct {
		text string
		want uint64
	}{
		{"0", 0},
		{"1000", 1000},
		{"1k", 1000},
		{"1.5M", 1_500_000},
		{"2G", 2_000_000_000},
		{"1T", 1_000_000_000_000},
		{"1P", 1_000_000_000_000_000},
		{"1Ki", 1024},
		{"10Mi", 10 << 20},
		{"0.5Gi", 512 << 20},
		{"1e3", 1000},
		{"", bad},
		{"k", bad},
		{"1K", bad},
		{"1m", bad},
		{"1ki", bad},
		{"1kk", bad},
		{"1i", bad},
		{"1 k", bad},
		{"-1k", bad},
		{"ten", bad},
		{"NaN", bad},
		{"NaNk", bad},
		{"Inf", bad},
		{"1e400", bad},
		{"9999999999P", bad},
	} {
		got, err := BitsPerSecond(test.text)
		if test.want == bad && err == nil || test.want != bad && (err != nil || got != test.want) {
			t.Errorf("BitsPerSecond(%q) = %d, %v, want %d", test.text, got, err, test.want)
		}
	}
}
