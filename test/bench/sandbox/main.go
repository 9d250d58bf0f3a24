// Command sandbox measures what a pod sandbox costs beyond its CNI plugins: in one run and
// alternately, bare libcni ADD and DEL (the floor), and minicri's Run, Status, Stop and
// Remove over its socket.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/test/bench/contender"
)

const (
	oneByOne = 40
	warmUp   = 4
	held     = 100
	// idleTime is how long a daemon that was started is left alone before it is weighed: it
	// looks every four seconds whether it holds garbage of its start.
	idleTime = 6 * time.Second
	// hostNetwork begins the names of what is measured of such pods.
	hostNetwork = "host-network "
)

func main() {
	contender.Main("sandbox", func(ctx context.Context, dir string) {
		n := contender.Start(ctx, filepath.Join(dir, "n"), contender.Runtime{Name: contender.Minicri})
		defer contender.Finally(n.Close)
		time.Sleep(idleTime)
		idle := float64(contender.Memory(n.PID())) / 1024
		m := &measurement{Node: n, floor: newFloor(n), took: map[string][]time.Duration{}, began: map[string][]time.Duration{}}
		m.alternate(ctx)
		m.runs(ctx)
		m.report()
		memory, processes := m.hold(ctx)
		contender.PrintTable(
			contender.Row{What: "Run / bare ADD, p50", Ours: m.p50("Run") / m.p50("bare ADD"), MostOfOurs: 1.12},
			contender.Row{What: "Stop / bare DEL, p50", Ours: m.p50("Stop") / m.p50("bare DEL"), MostOfOurs: 1.05},
			contender.Row{What: "Remove, p50 ms", Ours: m.p50("Remove"), MostOfOurs: 3},
			contender.Row{What: "Status, p50 ms", Ours: m.p50("Status"), MostOfOurs: 0.2},
			contender.Row{What: "host-network Run, p50 ms", Ours: m.p50("host-network Run"), MostOfOurs: 8},
			contender.Row{What: "host-network Stop, p50 ms", Ours: m.p50("host-network Stop"), MostOfOurs: 3},
			contender.Row{What: "runner per plugin run, ms", Ours: m.p50("plugin by the runner") - m.p50("plugin alone"), MostOfOurs: 0.5},
			contender.Row{What: "memory per held pod, MiB", Ours: memory, MostOfOurs: 0.2},
			contender.Row{What: "processes per held pod", Ours: processes, MostOfOurs: 1},
			contender.Row{What: "memory of the idle daemon, MiB", Ours: idle, MostOfOurs: 20},
		)
	})
}

// measurement collects durations by the name of what took them, and when the steps of a Run
// began after its first one.
type measurement struct {
	*contender.Node
	floor       *floor
	took, began map[string][]time.Duration
}

func (m *measurement) time(name string, do func()) {
	began := time.Now()
	do()
	m.took[name] = append(m.took[name], time.Since(began))
}

func (m *measurement) p50(name string) float64 {
	return contender.Milliseconds(contender.Quantile(m.took[name], 0.5))
}

// alternate takes turns between the floor, pods of their own network and pods of the host
// network, one at a time.
func (m *measurement) alternate(ctx context.Context) {
	for i := range warmUp + oneByOne {
		if i == warmUp {
			clear(m.took)
			clear(m.began)
		}
		m.bare(ctx, fmt.Sprintf("floor-%d", i))
		m.pod(ctx, "", fmt.Sprintf("pod-%d", i), m.RunPod)
		m.pod(ctx, hostNetwork, fmt.Sprintf("host-%d", i), m.RunHostPod)
	}
}

func (m *measurement) pod(ctx context.Context, kind, name string, run func(context.Context, string) *contender.Pod) {
	var id string
	m.time(kind+"Run", func() { id = run(ctx, name).ID })
	m.noteSteps(ctx, kind, id)
	for range 5 {
		m.time("bare call", func() { contender.Must(m.CRI.Version(ctx, &runtimeapi.VersionRequest{})) })
		m.time(kind+"Status", func() {
			contender.Must(m.CRI.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id}))
		})
	}
	m.time(kind+"Stop", func() { m.StopPod(ctx, id) })
	m.time(kind+"Remove", func() {
		contender.Must(m.CRI.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id}))
	})
}

// info is what is used of a pod's verbose status.
type info struct {
	PID      int
	Timeline []struct {
		step.Row
		Took string `json:"took"`
	}
}

func (m *measurement) info(ctx context.Context, id string) (info info) {
	answer := contender.Must(m.CRI.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true}))
	contender.Check(json.Unmarshal([]byte(answer.GetInfo()["info"]), &info))
	return info
}

// noteSteps notes the steps of a pod that has been run, as its timeline has them.
func (m *measurement) noteSteps(ctx context.Context, kind, id string) {
	timeline := m.info(ctx, id).Timeline
	if len(timeline) == 0 {
		contender.Check(fmt.Errorf("pod %s has no timeline", id))
	}
	for _, row := range timeline {
		name := kind + row.Step
		if row.Kind == "plugin" {
			name = kind + "  " + row.Step
		}
		took, _ := time.ParseDuration(row.Took) // none for one that took none
		m.took[name] = append(m.took[name], took)
		m.began[name] = append(m.began[name], row.Start.Sub(timeline[0].Start))
	}
}

// report prints what was timed, and where the time of a Run goes, in the order of the beginnings.
func (m *measurement) report() {
	fmt.Printf("\n%d pods, one at a time, in turn with the floor; milliseconds\n\n%-32s %9s %9s\n", oneByOne, "", "p50", "p95")
	for _, name := range []string{
		"bare ADD", "Run", "bare DEL", "Stop", "Remove", "bare call", "Status",
		hostNetwork + "Run", hostNetwork + "Stop", hostNetwork + "Remove", hostNetwork + "Status", "plugin alone", "plugin by the runner",
	} {
		fmt.Printf("%-32s %9.3f %9.3f\n", name, m.p50(name), contender.Milliseconds(contender.Quantile(m.took[name], 0.95)))
	}
	fmt.Printf("\nits steps, with the plugins below theirs; p50\n\n%-32s %9s %9s\n", "", "begins", "takes")
	var names []string
	order := map[string]time.Duration{}
	for name, began := range m.began {
		names = append(names, name)
		if order[name] = contender.Quantile(began, 0.5); strings.HasPrefix(name, hostNetwork) {
			order[name] += time.Hour // after the others
		}
	}
	slices.SortFunc(names, func(a, b string) int { return int(order[a] - order[b]) })
	for _, name := range names {
		fmt.Printf("%-32s %9.3f %9.3f\n", name, contender.Milliseconds(order[name]%time.Hour), m.p50(name))
	}
}

// hold runs many pods, several at a time, weighs them, and ends them. They cost all
// processes that are there because of them: what descends from the daemon, and their pauses.
func (m *measurement) hold(ctx context.Context) (memory, processes float64) {
	kib, count := 0, 0
	ids := make([]string, held)
	began := time.Now()
	contender.Parallel(held, func(i int) { ids[i] = m.RunPod(ctx, fmt.Sprintf("held-%d", i)).ID })
	ran, daemon := time.Since(began), float64(contender.Memory(m.PID()))/1024
	found := map[int]bool{}
	descendants(m.PID(), found)
	for _, id := range ids {
		found[m.info(ctx, id).PID] = true
	}
	for pid := range found {
		if its := contender.Memory(pid); its > 0 { // no shim on its way out
			kib, count = kib+its, count+1
		}
	}
	began = time.Now()
	contender.Parallel(held, func(i int) { m.RemovePod(ctx, ids[i]) })
	fmt.Printf("\n%d pods with %d in flight: run in %.2f s, removed in %.2f s; daemon with them %.1f MiB\n",
		held, contender.InFlight, ran.Seconds(), time.Since(began).Seconds(), daemon)
	return float64(kib) / 1024 / held, float64(count) / held
}

func descendants(of int, found map[int]bool) {
	for _, file := range contender.Must(filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", of))) {
		data, _ := os.ReadFile(file) // the thread may have ended
		for field := range strings.FieldsSeq(string(data)) {
			pid := contender.Must(strconv.Atoi(field))
			found[pid] = true
			descendants(pid, found)
		}
	}
}
