package contender

import (
	"fmt"
	"io"
	"text/tabwriter"
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
func PrintTable(out io.Writer, rows []Row) {
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(table, "\t%s\t%s\tratio\tto reach\t\t\n", Minicri, Containerd)
	for _, row := range rows {
		goal, reached := row.goal()
		theirs, ratio := "-", "-"
		if row.Theirs != 0 {
			theirs, ratio = fmt.Sprintf("%.4g", row.Theirs), fmt.Sprintf("%.2f", row.ratio())
		}
		fmt.Fprintf(table, "%s\t%.4g\t%s\t%s\t%s\t%s\t\n", row.What, row.Ours, theirs, ratio, goal, verdict(goal, reached))
	}
	_ = table.Flush()
}

func (r Row) ratio() float64 { return r.Ours / r.Theirs }

func (r Row) goal() (text string, reached bool) {
	switch {
	case r.AtMost > 0:
		return fmt.Sprintf("ratio <= %g", r.AtMost), r.ratio() <= r.AtMost
	case r.MostOfOurs > 0:
		return fmt.Sprintf("<= %g", r.MostOfOurs), r.Ours <= r.MostOfOurs
	}
	return "", false
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
