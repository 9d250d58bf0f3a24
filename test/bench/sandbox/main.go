// Command sandbox measures what a pod sandbox costs beyond its CNI plugins: in one run and alternately, bare libcni
// ADD and DEL (the floor), and minicri's Run, Status, Stop and Remove over its socket. With -burst it measures pods that
// are made at once instead, with several limits of plugins that run at once, and with the containerd in PATH.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/containernetworking/cni/libcni"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/network/runner"
	"github.com/minicri/minicri/test/bench/contender"
)

const (
	oneByOne = 120
	warmUp   = 4
	// idleTime is how long a daemon that was started is left alone before it is weighed.
	idleTime = 6 * time.Second
	// hostNetwork begins the names of what is measured of such pods.
	hostNetwork = "host-network "
)

func main() {
	pods := flag.Int("burst", 0, "pods that are made at once")
	flag.Parse()
	contender.Main("sandbox", func(ctx context.Context, dir string) {
		if *pods > 0 {
			burst(ctx, dir, *pods)
			return
		}
		n := contender.Start(ctx, filepath.Join(dir, "n"), contender.Runtime{Name: contender.Minicri})
		defer contender.Finally(n.Close)
		time.Sleep(idleTime)
		idle := float64(contender.Memory(n.PID())) / 1024
		m := &measurement{Node: n, floor: newFloor(n), took: contender.Times{}}
		m.alternate(ctx)
		m.runs(ctx)
		m.report()
		contender.PrintTable(
			contender.Row{What: "Run / bare ADD, p50", Ours: m.took.P50("Run") / m.took.P50("bare ADD"), MostOfOurs: 1.2},
			contender.Row{What: "Stop / bare DEL, p50", Ours: m.took.P50("Stop") / m.took.P50("bare DEL"), MostOfOurs: 1.05},
			contender.Row{What: "Remove, p50 ms", Ours: m.took.P50("Remove"), MostOfOurs: 3},
			contender.Row{What: "Status, p50 ms", Ours: m.took.P50("Status"), MostOfOurs: 0.2},
			contender.Row{What: "host-network Run, p50 ms", Ours: m.took.P50("host-network Run"), MostOfOurs: 10},
			contender.Row{What: "host-network Stop, p50 ms", Ours: m.took.P50("host-network Stop"), MostOfOurs: 3},
			contender.Row{What: "runner per plugin run, ms", Ours: m.took.P50("plugin by the runner") - m.took.P50("plugin alone"), MostOfOurs: 0.5},
			contender.Row{What: "memory of the idle daemon, MiB", Ours: idle, MostOfOurs: 20},
		)
	})
}

// measurement collects durations by the name of what took them.
type measurement struct {
	*contender.Node
	floor *floor
	took  contender.Times
}

// alternate takes turns between the floor, pods of their own network and pods of the host network, one at a time.
func (m *measurement) alternate(ctx context.Context) {
	for i := range warmUp + oneByOne {
		if i == warmUp {
			clear(m.took)
		}
		m.bare(ctx, fmt.Sprintf("floor-%d", i))
		m.pod(ctx, "", fmt.Sprintf("pod-%d", i), m.RunPod)
		m.pod(ctx, hostNetwork, fmt.Sprintf("host-%d", i), m.RunHostPod)
	}
}

func (m *measurement) pod(ctx context.Context, kind, name string, run func(context.Context, string) *contender.Pod) {
	var id string
	m.took.Time(kind+"Run", func() { id = run(ctx, name).ID })
	for range 5 {
		m.took.Time("bare call", func() { contender.Must(m.CRI.Version(ctx, &runtimeapi.VersionRequest{})) })
		m.took.Time(kind+"Status", func() {
			contender.Must(m.CRI.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id}))
		})
	}
	m.took.Time(kind+"Stop", func() { m.StopPod(ctx, id) })
	m.took.Time(kind+"Remove", func() {
		contender.Must(m.CRI.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id}))
	})
}

// report prints what was timed.
func (m *measurement) report() {
	fmt.Printf("\n%d pods, one at a time, in turn with the floor; milliseconds\n\n%-32s %9s %9s\n", oneByOne, "", "p50", "p95")
	for _, name := range []string{
		"bare ADD", "Run", "bare DEL", "Stop", "Remove", "bare call", "Status",
		hostNetwork + "Run", hostNetwork + "Stop", hostNetwork + "Remove", hostNetwork + "Status", "plugin alone", "plugin by the runner",
	} {
		fmt.Printf("%-32s %9.3f %9.3f\n", name, m.took.P50(name), contender.Milliseconds(contender.Quantile(m.took[name], 0.95)))
	}
}

// floor is what any runtime has to pay: libcni with the same plugins and the same
// configuration, in a namespace that is there already.
type floor struct {
	cni        *libcni.CNIConfig
	list       *libcni.NetworkConfigList
	namespaces *namespace.Dir
}

func newFloor(n *contender.Node) *floor {
	return &floor{
		cni:        libcni.NewCNIConfigWithCacheDir([]string{contender.Bin("cni")}, n.Path("floor-cache"), nil),
		list:       contender.Must(libcni.NetworkConfFromBytes(n.ConfList())),
		namespaces: contender.Must(namespace.Open(n.Path("netns"), "floor-")),
	}
}

func (m *measurement) bare(ctx context.Context, id string) {
	contender.Check(m.floor.namespaces.Create(id))
	conf := &libcni.RuntimeConf{
		ContainerID: id, NetNS: m.floor.namespaces.Path(id), IfName: "eth0",
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAME", id}, {"K8S_POD_NAMESPACE", "bench"}},
	}
	m.took.Time("bare ADD", func() { contender.Must(m.floor.cni.AddNetworkList(ctx, m.floor.list, conf)) })
	m.took.Time("bare DEL", func() { contender.Check(m.floor.cni.DelNetworkList(ctx, m.floor.list, conf)) })
	contender.Check(m.floor.namespaces.Remove(id))
}

const (
	// plugin is one of the real ones, in a verb that does nothing: what is left is the process.
	plugin   = "host-local"
	runTimes = 200
)

// runs measures what a run of one plugin takes alone, and through the runner with all that the daemon does for a run.
func (m *measurement) runs(ctx context.Context) {
	r := contender.Must(runner.Open(contender.Must(cgroup.GroupParent(m.CgroupParent())), "bench-cni-"))
	program, version := filepath.Join(contender.Bin("cni"), plugin), []string{"CNI_COMMAND=VERSION"}
	for range runTimes {
		m.took.Time("plugin alone", func() {
			command := exec.CommandContext(ctx, program)
			command.Env = version
			if output, err := command.CombinedOutput(); err != nil {
				contender.Check(fmt.Errorf("%s: %w: %s", program, err, output))
			}
		})
		m.took.Time("plugin by the runner", func() {
			run := contender.Must(r.Begin(runner.Request{Verb: "VERSION", Network: "bench", Plugins: 1, Limit: time.Minute}))
			_, err := run.ExecPlugin(ctx, program, nil, version)
			contender.Check(errors.Join(err, run.End()))
		})
	}
}
