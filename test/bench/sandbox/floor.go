package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/network/runner"
	"github.com/minicri/minicri/test/bench/contender"
)

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
