package main

import (
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/minicri/minicri/test/bench/contender"
)

// goal is one number of ours, and the most that it may be.
type goal struct {
	what       string
	is, atMost float64
}

// printGoals prints what can be told from the marks that were measured.
func (s *scale) printGoals() {
	table := tabwriter.NewWriter(s.out, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(table, "\n%s\t\tto reach\t\t\n", contender.Minicri)
	for _, g := range s.goals() {
		verdict := "✓"
		if g.is > g.atMost {
			verdict = "✗"
		}
		fmt.Fprintf(table, "%s\t%.4g\t<= %g\t%s\t\n", g.what, g.is, g.atMost, verdict)
	}
	_ = table.Flush()
}

func (s *scale) goals() (goals []goal) {
	var ours []row
	for _, r := range s.rows {
		if r.runtime == contender.Minicri {
			ours = append(ours, r)
		}
	}
	for i, r := range ours {
		if r.pods >= 100 {
			goals = append(goals,
				goal{fmt.Sprintf("threads of the supervisor with %d pods", r.pods), float64(r.owners.Shims.Threads), 24},
				goal{fmt.Sprintf("threads of the daemon with %d pods", r.pods), float64(r.owners.Daemon.Threads), 40})
		}
		if r.pods == 100 {
			goals = append(goals, goal{"daemon and supervisor with 100 pods, MiB", mib(r.owners.Daemon) + mib(r.owners.Shims), 45})
		}
		if i > 0 {
			slope := float64(r.owners.KiB()-ours[0].owners.KiB()) / float64(r.pods-ours[0].pods)
			goals = append(goals, goal{fmt.Sprintf("memory of a pod between %d and %d, KiB", ours[0].pods, r.pods), slope, 250})
		}
	}
	if len(ours) < 2 {
		return goals
	}
	first, last := ours[0], ours[len(ours)-1]
	for _, operation := range []struct {
		name   string
		of     func(times) []time.Duration
		atMost float64
	}{
		{"Run in the default network", func(t times) []time.Duration { return t.run }, 1.5},
		{"host-network Run", func(t times) []time.Duration { return t.hostRun }, 1.3},
		{"create + start", func(t times) []time.Duration { return t.createStart }, 1.3},
		{"stop of a pod", func(t times) []time.Duration { return t.stop }, 1.3},
	} {
		what := fmt.Sprintf("%s with %d pods, of that with %d", operation.name, last.pods, first.pods)
		goals = append(goals, goal{what, ratio(operation.of(last.times), operation.of(first.times)), operation.atMost})
	}
	return goals
}
