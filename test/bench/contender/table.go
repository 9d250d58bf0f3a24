package contender

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"text/tabwriter"
	"time"
)

// Row compares two runtimes in one number.
type Row struct {
	What         string // with its unit
	Ours, Theirs float64
	// AtMost is the goal of the ratio of ours to theirs, MostOfOurs that of our number
	// alone; 0 is none. Theirs is 0 where the other one is not measured.
	AtMost, MostOfOurs float64
}

// PrintTable prints rows with their goals and whether they are reached.
func PrintTable(rows ...Row) {
	table := tabwriter.NewWriter(os.Stdout, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(table, "\n\t%s\t%s\tratio\tto reach\t\t\n", Minicri, Containerd)
	for _, r := range rows {
		theirs, ratio, goal, reached := "-", "-", "", true
		if r.Theirs != 0 {
			theirs, ratio = fmt.Sprintf("%.4g", r.Theirs), fmt.Sprintf("%.2f", r.Ours/r.Theirs)
		}
		switch {
		case r.AtMost > 0:
			goal, reached = fmt.Sprintf("ratio <= %g", r.AtMost), r.Ours/r.Theirs <= r.AtMost
		case r.MostOfOurs > 0:
			goal, reached = fmt.Sprintf("<= %g", r.MostOfOurs), r.Ours <= r.MostOfOurs
		}
		fmt.Fprintf(table, "%s\t%.4g\t%s\t%s\t%s\t%s\t\n", r.What, r.Ours, theirs, ratio, goal, verdict(goal, reached))
	}
	Check(table.Flush())
}

func verdict(goal string, reached bool) string {
	switch {
	case goal == "":
		return ""
	case reached:
		return "✓"
	}
	return "✗"
}

// Sample are durations of one thing, by the node.
type Sample [2][]time.Duration

// Time adds what do takes with a node.
func (s *Sample) Time(node int, do func()) {
	began := time.Now()
	do()
	s[node] = append(s[node], time.Since(began))
}

// Times are durations by the name of what took them.
type Times map[string][]time.Duration

// Time adds what do takes.
func (t Times) Time(name string, do func()) {
	began := time.Now()
	do()
	t[name] = append(t[name], time.Since(began))
}

// P50 is a median in milliseconds.
func (t Times) P50(name string) float64 { return Milliseconds(Quantile(t[name], 0.5)) }

// Medians fills in the medians of durations, in milliseconds.
func (r Row) Medians(of Sample) Row {
	for i, number := range []*float64{&r.Ours, &r.Theirs} {
		if len(of[i]) > 0 {
			*number = Milliseconds(Quantile(of[i], 0.5))
		}
	}
	return r
}

// Quantile is that of values: 0.5 is the median.
func Quantile[T cmp.Ordered](values []T, q float64) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

// Milliseconds are for people.
func Milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Alternate does one thing with each of two nodes in every round, in turn.
func Alternate(rounds int, do func(round, node int)) {
	for round := range rounds {
		for i := range 2 {
			do(round, (round+i)%2)
		}
	}
}
