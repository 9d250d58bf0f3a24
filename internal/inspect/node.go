package inspect

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/procfs"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/timeline"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

// Probes take the locks of pods, containers and attachments for a moment.
func (n *Node) Probes() map[string]func() {
	return map[string]func(){
		"pods": func() { n.Sandboxes.Building() }, "containers": func() { n.Containers.List() }, "attachments": func() { n.Networks.Pending() },
	}
}

// Watch takes each lock that all calls need, once a period, and then calls ping, until the context ends. If one takes
// longer it logs all stacks, which a restart would lose. One that hangs keeps Watch from returning.
func Watch(ctx context.Context, probes map[string]func(), period time.Duration, ping func(), logger *slog.Logger) {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		for name, take := range probes {
			late := time.AfterFunc(period, func() {
				logger.Error("the daemon is stuck: systemd's watchdog will restart it, and the pods keep running", "probe", name, "goroutines", stacks())
			})
			take()
			late.Stop()
		}
		ping()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Node is what a daemon knows.
type Node struct {
	Root, State string // the durable and the volatile directory

	Sandboxes  *sandbox.Store
	Containers *container.Store
	Networks   *network.CNI
	Lives      *step.Lives
	Measure    func(context.Context) []*runtimeapi.PodSandboxStats // of the pods that are ready
}

// Timelines returns the pods that were asked for, see query.
func (n *Node) Timelines(wanted string) ([]timeline.Pod, error) {
	containers := make(map[string][]timeline.Container)
	for _, c := range n.Containers.List() {
		containers[c.SandboxID] = append(containers[c.SandboxID], containerOf(c.ID, c.Config(), c.Facts(), c.Rows.Live()))
	}
	var pods []timeline.Pod
	listed := n.Sandboxes.List()
	for i, sb := range append(listed, n.Sandboxes.Building()...) {
		p := podOf(sb.ID, sb.Config(), sb.Facts(), n.Sandboxes.LiveAddresses(sb), sb.Rows.Live())
		if i >= len(listed) {
			p.State = timeline.Building
		}
		p.Containers, p.Network = containers[sb.ID], networkOf(n.Root, sb.ID, n.Sandboxes.NetnsPath(sb), sb.Facts().CNIResult)
		pods = append(pods, p)
	}
	return query(pods, n.Lives, wanted)
}

// Files are the directories of a daemon that does not run.
type Files struct {
	Root, State string
	Netns       func(id string) string // the path of a pod's network namespace
}

// Timelines returns the pods that were asked for, see query. It leaves out records that cannot be read.
func (f Files) Timelines(wanted string) ([]timeline.Pod, error) {
	if _, err := os.Stat(f.Root); err != nil {
		return nil, err
	}
	directory := filepath.Join(f.Root, "containers")
	ids, err := state.IDs(directory)
	containers := make(map[string][]timeline.Container)
	for _, id := range ids {
		record, err := state.Peek[container.Record](directory, id)
		config := &runtimeapi.ContainerConfig{}
		if err == nil && decode(record.Config, config) == nil {
			facts, _ := state.Peek[container.Facts](filepath.Join(f.Root, "container-facts"), id) // none: it was being made
			containers[record.SandboxID] = append(containers[record.SandboxID], containerOf(id, config, &facts, facts.Timeline))
		}
	}
	directory = filepath.Join(f.Root, "sandboxes")
	podIDs, podErr := state.IDs(directory)
	var pods []timeline.Pod
	for _, id := range podIDs {
		record, err := state.Peek[sandbox.Record](directory, id)
		config := &runtimeapi.PodSandboxConfig{}
		if err != nil || decode(record.Config, config) != nil {
			continue
		}
		facts, err := state.Peek[sandbox.Facts](filepath.Join(f.State, "facts"), id)
		p := podOf(id, config, &facts, facts.Addresses, facts.Timeline)
		if err != nil {
			p.State = timeline.Building
		}
		p.Containers, p.Network = containers[id], networkOf(f.Root, id, f.Netns(id), facts.CNIResult)
		pods = append(pods, p)
	}
	if err := errors.Join(err, podErr); err != nil {
		return nil, err
	}
	return query(pods, step.FindLives(filepath.Join(f.Root, "lives")), wanted)
}

func decode(config []byte, into proto.Message) error {
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(config, into)
}

func podOf(id string, config *runtimeapi.PodSandboxConfig, facts *sandbox.Facts, addresses []netip.Addr, rows []step.Row) timeline.Pod {
	m := config.GetMetadata()
	p := timeline.Pod{Kind: "pod", ID: id, Name: m.GetNamespace() + "/" + m.GetName(), Attempt: m.GetAttempt(), State: timeline.NotReady, Rows: rows}
	if facts.Ready() {
		p.State = timeline.Ready
	}
	for _, address := range addresses {
		p.Addresses = append(p.Addresses, address.String())
	}
	return p
}

func containerOf(id string, config *runtimeapi.ContainerConfig, facts *container.Facts, rows []step.Row) timeline.Container {
	state := strings.ToLower(strings.TrimPrefix(facts.State().String(), "CONTAINER_"))
	if facts.FinishedAt != 0 {
		state += fmt.Sprintf(" (%s, %d)", facts.ExitReason(), facts.ExitCode)
	}
	image, m := cmp.Or(config.GetImage().GetUserSpecifiedImage(), config.GetImage().GetImage()), config.GetMetadata()
	return timeline.Container{ID: id, Name: m.GetName(), Attempt: m.GetAttempt(), Image: image, State: state, Rows: rows}
}

// networkOf reads the attachment from the journal. It returns nil if the pod never had one.
func networkOf(root, id, path string, result []byte) *timeline.Network {
	attachment, err := state.Peek[network.Attachment](filepath.Join(root, "attachments"), id)
	if err != nil && len(result) == 0 {
		return nil
	}
	n := &timeline.Network{Name: attachment.Network, Config: attachment.Config, Result: result, Path: path}
	if attachment.Tries > 0 {
		n.Waits = fmt.Sprintf("CNI DEL has failed %d times since %s and is repeated: %s", attachment.Tries,
			attachment.FirstFailure.UTC().Format("2006-01-02 15:04:05 UTC"), attachment.LastError)
	}
	return n
}

// query finds pods, also those that are gone or failed, by an id or its beginning, a name, NAMESPACE/NAME,
// the same of a container, or "" for all. The last to begin comes first.
func query(pods []timeline.Pod, lives *step.Lives, wanted string) ([]timeline.Pod, error) {
	past, err := lives.List()
	if err != nil {
		return nil, err
	}
	pods = slices.DeleteFunc(join(pods, past), func(p timeline.Pod) bool { return !p.Matches(wanted) })
	for i := range pods {
		pods[i].Finish()
	}
	slices.SortStableFunc(pods, func(a, b timeline.Pod) int { return b.Begin.Compare(a.Begin) })
	return pods, nil
}

// join adds lives of containers to their pods, and other lives as pods.
func join(pods []timeline.Pod, past []step.Life) []timeline.Pod {
	index := make(map[string]int)
	for i, p := range pods {
		index[p.ID] = i
	}
	add := func(p timeline.Pod) {
		if _, there := index[p.ID]; !there {
			index[p.ID], pods = len(pods), append(pods, p)
		}
	}
	for _, life := range past {
		if life.Kind == "container" {
			continue
		}
		p := timeline.Pod{Kind: life.Kind, ID: life.ID, Name: life.Name, Attempt: life.Attempt, State: stateOf(life), Error: life.Error, Rows: life.Rows}
		if len(life.Network) > 0 {
			var named struct{ Name string }
			_ = json.Unmarshal(life.Network, &named) // of what is no JSON there is none
			p.Network = &timeline.Network{Name: named.Name, Config: life.Network}
		}
		add(p)
	}
	for _, life := range past {
		if life.Kind != "container" {
			continue
		}
		slash := max(0, strings.LastIndexByte(life.Name, '/'))
		add(timeline.Pod{Kind: "pod", ID: life.Pod, Name: life.Name[:slash], State: timeline.Removed})
		p := &pods[index[life.Pod]]
		if !slices.ContainsFunc(p.Containers, func(c timeline.Container) bool { return c.ID == life.ID }) {
			p.Containers = append(p.Containers, timeline.Container{
				ID: life.ID, Name: strings.TrimPrefix(life.Name[slash:], "/"), Attempt: life.Attempt, State: stateOf(life), Error: life.Error, Rows: life.Rows,
			})
		}
	}
	return pods
}

func stateOf(life step.Life) string {
	if life.Error != "" {
		return timeline.Failed
	}
	return timeline.Removed
}

// Glance looks at all pods of the node.
func (n *Node) Glance(ctx context.Context) *timeline.Glance {
	g := &timeline.Glance{At: time.Now(), Pods: []timeline.Line{}, Daemon: memoryOf(os.Getpid()), Supervisors: SupervisorMemory(n.State)}
	measured := make(map[string]*runtimeapi.LinuxPodSandboxStats)
	for _, stats := range n.Measure(ctx) {
		measured[stats.GetAttributes().GetId()] = stats.GetLinux()
	}
	problems := make(map[string][]string) // by pod
	for _, a := range n.Networks.Pending() {
		problems[a.ID] = append(problems[a.ID], redact.Text(fmt.Sprintf("CNI DEL of %s has failed %d times: %s", a.Network, a.Tries, a.LastError)))
	}
	for _, d := range n.Networks.Drifted() {
		problems[d.ID] = append(problems[d.ID], redact.Text(fmt.Sprintf("CNI CHECK of %s: %s", d.Network, d.Error)))
	}
	listed := n.Sandboxes.List() // last: a pod that is made meanwhile would be in neither list
	for i, sb := range append(listed, n.Sandboxes.Building()...) {
		p := podOf(sb.ID, sb.Config(), sb.Facts(), n.Sandboxes.LiveAddresses(sb), nil)
		used := measured[sb.ID]
		line := timeline.Line{
			ID: sb.ID, Name: p.Name, State: p.State, Created: time.Unix(0, sb.CreatedAt), Addresses: p.Addresses, Problems: problems[sb.ID],
			Runtime: g.Supervisors/uint64(max(1, len(listed))) + memoryOf(sb.Facts().Pause.PID),
			Memory:  used.GetMemory().GetWorkingSetBytes().GetValue(), CPU: used.GetCpu().GetUsageCoreNanoSeconds().GetValue(),
			Received: used.GetNetwork().GetDefaultInterface().GetRxBytes().GetValue(), Sent: used.GetNetwork().GetDefaultInterface().GetTxBytes().GetValue(),
		}
		if i >= len(listed) {
			line.State = timeline.Building
		}
		if stage := sb.Stage(); stage != nil {
			line.Stage, line.For = stage.Step, stage.Took
		}
		line.Running, line.Containers = countsOf(n.Containers.ListPod(sb.ID))
		delete(problems, sb.ID)
		g.Pods = append(g.Pods, line)
	}
	g.Released = len(problems)
	older, _ := n.Sandboxes.OlderSupervisors() // those that can be read
	for _, one := range older {
		g.Older = append(g.Older, timeline.Older{Build: one.Group, Version: one.Version, Pods: one.Pods, Problem: one.Problem})
	}
	slices.SortFunc(g.Pods, func(a, b timeline.Line) int { return strings.Compare(a.Name+a.ID, b.Name+b.ID) })
	return g
}

// countsOf counts the containers of a pod that run, and those that should: the newest of each name, unless it has
// completed its work, as an init container does.
func countsOf(containers []*container.Container) (running, wanted int) {
	newest := make(map[string]*container.Container)
	for _, c := range containers {
		m := c.Config().GetMetadata()
		if other := newest[m.GetName()]; other == nil || other.Config().GetMetadata().GetAttempt() < m.GetAttempt() {
			newest[m.GetName()] = c
		}
	}
	for _, c := range newest {
		if c.State() == runtimeapi.ContainerState_CONTAINER_RUNNING {
			running++
		}
		if c.State() != runtimeapi.ContainerState_CONTAINER_EXITED || c.Facts().ExitCode != 0 {
			wanted++
		}
	}
	return running, wanted
}

// SupervisorMemory returns the memory of all supervisors of a daemon in bytes (Pss).
func SupervisorMemory(stateDir string) (bytes uint64) {
	processes, _ := procfs.AllProcs() // without them their memory is not known
	for _, p := range processes {
		arguments, err := p.CmdLine()
		if err == nil && len(arguments) > 1 && arguments[1] == "serve" && strings.Contains(strings.Join(arguments, "\x00"), filepath.Join(stateDir, "shims")+"/") {
			bytes += memoryOf(p.PID)
		}
	}
	return bytes
}

// memoryOf is the Pss of a process in bytes (proc_pid_smaps(5)), 0 if it is gone.
func memoryOf(pid int) uint64 {
	p, err := procfs.NewProc(pid)
	if err != nil {
		return 0
	}
	maps, _ := p.ProcSMapsRollup()
	return maps.Pss
}
