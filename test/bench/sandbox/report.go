package main

import (
	"fmt"

	"github.com/minicri/minicri/test/bench/contender"
)

func (m *measurement) p50(name string) float64 { return m.quantile(name, 0.5) }

func (m *measurement) quantile(name string, q float64) float64 {
	return contender.Milliseconds(contender.Quantile(m.took[name], q))
}

func (m *measurement) report(idle int, d density) {
	fmt.Printf("\n%d pods, one at a time, in turn with the floor; milliseconds\n\n", oneByOne)
	fmt.Printf("%-30s %9s %9s\n", "", "p50", "p95")
	for _, name := range []string{
		"bare ADD", "Run", "bare DEL", "Stop", "Remove", "bare call", "Status",
		hostNetwork + "Run", hostNetwork + "Stop", hostNetwork + "Remove", hostNetwork + "Status",
		"plugin alone", "plugin by the runner",
	} {
		fmt.Printf("%-30s %9.3f %9.3f\n", name, m.p50(name), m.quantile(name, 0.95))
	}
	m.reportSteps()
	fmt.Printf("\n%-42s %10s %10s\n", "goal", "measured", "to reach")
	goal("Run p50 / bare ADD p50", "%.2f", m.p50("Run")/m.p50("bare ADD"), 1.12)
	goal("Stop p50 / bare DEL p50", "%.2f", m.p50("Stop")/m.p50("bare DEL"), 1.05)
	goal("Remove p50, ms", "%.2f", m.p50("Remove"), 3)
	goal("Status p50, ms", "%.2f", m.p50("Status"), 0.2)
	goal("host-network Run p50, ms", "%.2f", m.p50("host-network Run"), 8)
	goal("host-network Stop p50, ms", "%.2f", m.p50("host-network Stop"), 3)
	goal("runner per plugin run, ms", "%.2f", m.p50("plugin by the runner")-m.p50("plugin alone"), 0.5)
	goal("memory per held pod, MiB", "%.2f", d.memoryPerPod/1024, 0.2)
	goal("processes per held pod", "%.2f", float64(d.processes)/held, 1)
	goal("memory of the idle daemon, MiB", "%.1f", float64(idle)/1024, 20)
	fmt.Printf("\n%d pods with %d in flight: run in %.2f s, removed in %.2f s; daemon with them %.1f MiB\n",
		held, contender.InFlight, d.runAll.Seconds(), d.endAll.Seconds(), float64(d.daemon)/1024)
}

func goal(what, format string, measured, reach float64) {
	mark := "✓"
	if measured > reach {
		mark = "✗"
	}
	fmt.Printf("%s %-40s %10s %10s\n", mark, what, fmt.Sprintf(format, measured), fmt.Sprintf(format, reach))
}
