// Command sandbox measures what a pod sandbox costs beyond its CNI plugins: in
// one run and alternately, bare libcni ADD and DEL (the floor), and minicri's
// Run, Status, Stop and Remove over its socket.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/bench/contender"
	"github.com/minicri/minicri/test/bench/node"
)

const (
	oneByOne = 40
	warmUp   = 4
	held     = 100
	// idleTime is how long a daemon that was started is left alone before it is
	// weighed: it looks every four seconds whether it holds garbage of its start.
	idleTime = 6 * time.Second
	// hostNetwork begins the names of what is measured of such pods.
	hostNetwork = "host-network "
)

func main() { contender.Main("sandbox", run) }

func run(ctx context.Context) (err error) {
	self := contender.Must(os.Executable())
	n := contender.Must(node.Start(ctx, filepath.Dir(filepath.Dir(self))))
	defer func() { err = errors.Join(err, n.Close()) }()
	time.Sleep(idleTime)
	idle := contender.Must(contender.Memory(n.PID()))
	m := &measurement{node: n, floor: newFloor(n), took: make(map[string][]time.Duration), began: make(map[string][]time.Duration)}
	contender.Check(m.alternate(ctx))
	contender.Check(m.runs(ctx))
	density := contender.Must(m.hold(ctx))
	m.report(idle, density)
	return nil
}

// measurement collects durations by the name of what took them.
type measurement struct {
	node  *node.Node
	floor *floor
	took  map[string][]time.Duration
	// began is when the steps of a Run did, after its first one.
	began map[string][]time.Duration
}

func (m *measurement) time(name string, do func() error) error {
	began := time.Now()
	err := do()
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	m.took[name] = append(m.took[name], time.Since(began))
	return nil
}

// alternate takes turns between the floor, pods of their own network and pods
// of the host network, one at a time.
func (m *measurement) alternate(ctx context.Context) error {
	for i := range warmUp + oneByOne {
		if i == warmUp {
			clear(m.took)
			clear(m.began)
		}
		contender.Check(m.bare(ctx, fmt.Sprintf("floor-%d", i)))
		contender.Check(m.pod(ctx, "", m.node.Pod(fmt.Sprintf("pod-%d", i), runtimeapi.NamespaceMode_POD)))
		contender.Check(m.pod(ctx, hostNetwork, m.node.Pod(fmt.Sprintf("host-%d", i), runtimeapi.NamespaceMode_NODE)))
	}
	return nil
}

func (m *measurement) bare(ctx context.Context, id string) error {
	contender.Check(m.floor.namespaces.Create(id))
	contender.Check(m.time("bare ADD", func() error { return m.floor.add(ctx, id) }))
	contender.Check(m.time("bare DEL", func() error { return m.floor.del(ctx, id) }))
	return m.floor.namespaces.Remove(id)
}

func (m *measurement) pod(ctx context.Context, kind string, config *runtimeapi.PodSandboxConfig) error {
	var id string
	contender.Check(m.time(kind+"Run", func() (err error) {
		id, err = m.run(ctx, config)
		return err
	}))
	contender.Check(m.noteSteps(ctx, kind, id))
	for range 5 {
		contender.Check(m.time("bare call", func() error {
			_, err := m.node.Client.Version(ctx, &runtimeapi.VersionRequest{})
			return err
		}))
		contender.Check(m.time(kind+"Status", func() error {
			_, err := m.node.Client.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
			return err
		}))
	}
	return m.end(ctx, kind, id)
}

func (m *measurement) run(ctx context.Context, config *runtimeapi.PodSandboxConfig) (string, error) {
	response, err := m.node.Client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
	return response.GetPodSandboxId(), err
}

func (m *measurement) end(ctx context.Context, kind, id string) error {
	contender.Check(m.time(kind+"Stop", func() error {
		_, err := m.node.Client.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
		return err
	}))
	return m.time(kind+"Remove", func() error {
		_, err := m.node.Client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
		return err
	})
}
