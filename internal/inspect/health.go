package inspect

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/timeline"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

// Probe takes a lock for a moment, and returns when it has had it.
type Probe struct {
	Name string
	Take func()
}

// Probes of a node: the lists of pods, containers and attachments.
func (n *Node) Probes() []Probe {
	return []Probe{
		{"pods", func() { n.Sandboxes.Building() }},
		{"containers", func() { n.Containers.List() }},
		{"attachments", func() { n.Networks.Pending() }},
	}
}

// Watch takes every lock that all calls need once in a period, and calls ping when it
// has had them all, until the context ends: nothing that waits for one of them waits
// forever. A pod that hangs, a plugin or a disk does not count: they hold up no other.
// A probe that takes longer than a period is logged with the stacks of all goroutines,
// which a restart would take along; one that hangs keeps Watch from returning.
func Watch(ctx context.Context, probes []Probe, period time.Duration, ping func(), logger *slog.Logger) {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		for _, probe := range probes {
			late := time.AfterFunc(period, func() {
				logger.Error("the daemon is stuck: systemd's watchdog will restart it, and the pods keep running", "probe", probe.Name, "goroutines", string(goroutines()))
			})
			probe.Take()
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
	// Root is the daemon's durable directory, State the volatile one.
	Root, State string

	Sandboxes  *sandbox.Store
	Containers *container.Store
	Networks   *network.CNI
	Lives      *step.Lives
	// Measure measures the pods that are ready.
	Measure func(context.Context) []*runtimeapi.PodSandboxStats
}

// Timelines are the pods that are asked for; see query.
func (n *Node) Timelines(wanted string) ([]timeline.Pod, error) {
	return query(n.pods(), n.Lives, wanted)
}

func (n *Node) pods() (found []timeline.Pod) {
	containers := make(map[string][]*container.Container)
	for _, c := range n.Containers.List() {
		containers[c.SandboxID] = append(containers[c.SandboxID], c)
	}
	listed := n.Sandboxes.List()
	for i, sb := range append(listed, n.Sandboxes.Building()...) {
		p := headOf(sb.ID, sb.Config().GetMetadata())
		p.State = stateOf(sb.Facts(), i >= len(listed))
		for _, c := range containers[sb.ID] {
			m := c.Config().GetMetadata()
			p.Containers = append(p.Containers, timeline.Container{
				ID: c.ID, Name: m.GetName(), Attempt: m.GetAttempt(), Image: imageOf(c.Config()), State: containerState(c.Facts()), Rows: c.Timeline(),
			})
		}
		p.Rows = sb.Timeline()
		for _, address := range n.Sandboxes.LiveAddresses(sb) {
			p.Addresses = append(p.Addresses, address.String())
		}
		p.Network = networkOf(n.Root, sb.ID, n.Sandboxes.NetnsPath(sb), sb.Facts().CNIResult)
		found = append(found, p)
	}
	return found
}

func headOf(id string, m *runtimeapi.PodSandboxMetadata) timeline.Pod {
	return timeline.Pod{Kind: "pod", ID: id, Name: m.GetNamespace() + "/" + m.GetName(), Attempt: m.GetAttempt()}
}

func stateOf(facts *sandbox.Facts, building bool) string {
	switch {
	case building:
		return timeline.Building
	case facts.Ready():
		return timeline.Ready
	default:
		return timeline.NotReady
	}
}

// containerState is the CRI's state in a word, with how it ended.
func containerState(facts *container.Facts) string {
	text := strings.ToLower(strings.TrimPrefix(facts.State().String(), "CONTAINER_"))
	if facts.FinishedAt != 0 {
		text += fmt.Sprintf(" (%s, %d)", facts.ExitReason(), facts.ExitCode)
	}
	return text
}

func imageOf(config *runtimeapi.ContainerConfig) string {
	if named := config.GetImage().GetUserSpecifiedImage(); named != "" {
		return named
	}
	return config.GetImage().GetImage()
}

// networkOf reads the attachment from the journal; nil if the pod has none, and
// never had.
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

func networkName(config []byte) string {
	var list struct {
		Name string `json:"name"`
	}
	_ = json.Unmarshal(config, &list) // of what is no JSON there is no name
	return list.Name
}
