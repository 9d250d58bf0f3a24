package contender

import (
	"slices"
	"time"
)

// Quantiles fills in durations' quantiles, in milliseconds.
func (r Row) Quantiles(took [2][]time.Duration, q float64) Row {
	return r.Numbers(took, func(all []time.Duration) float64 { return Milliseconds(Quantile(all, q)) })
}

// Medians fills in the medians of durations, in milliseconds.
func (r Row) Medians(took [2][]time.Duration) Row { return r.Quantiles(took, 0.5) }

// Costs fills in how many milliseconds each of something took.
func (r Row) Costs(used [2][]time.Duration, count float64) Row {
	return r.Numbers(used, func(all []time.Duration) float64 { return Milliseconds(Quantile(all, 0.5)) / count })
}

// Numbers fills in what follows from durations.
func (r Row) Numbers(of [2][]time.Duration, number func([]time.Duration) float64) Row {
	r.Ours, r.Theirs = number(of[0]), number(of[1])
	return r
}

// Quantile is that of durations: 0.5 is the median.
func Quantile(durations []time.Duration, q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(durations))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

// Milliseconds are for people.
func Milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Timed appends what do took.
func Timed(to *[]time.Duration, do func() error) error {
	began := time.Now()
	err := do()
	*to = append(*to, time.Since(began))
	return err
}

// Alternate does one thing with each of two nodes in every round, in turn.
func Alternate(rounds int, do func(round, node int) error) error {
	for round := range rounds {
		for i := range 2 {
			Check(do(round, (round+i)%2))
		}
	}
	return nil
}
