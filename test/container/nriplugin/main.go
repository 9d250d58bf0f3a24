// Command nriplugin are NRI plugins for tests, made of the stub that others are
// made of. Its name says which one it is: logger writes down every request and
// can be made by annotations of pods to fail, to hang or to die; the others
// adjust containers as annotations say.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"google.golang.org/protobuf/encoding/protojson"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "nriplugin:", err)
		os.Exit(1)
	}
}

func run() error {
	socket := flag.String("socket", "", "where the runtime listens; empty for a plugin that the runtime has started")
	index := flag.String("index", "10", "the plugin's index")
	name := flag.String("name", os.Getenv(api.PluginNameEnvVar), "which plugin it is")
	log := flag.String("log", "", "file of the logger; empty for the one that its configuration names")
	flag.Parse()
	plugin, err := pluginOf(*name, *log)
	if err != nil {
		return err
	}
	var options []stub.Option
	if *socket != "" {
		options = append(options, stub.WithSocketPath(*socket), stub.WithPluginName(*name), stub.WithPluginIdx(*index))
	}
	s, err := stub.New(plugin, options...)
	if err != nil {
		return err
	}
	if l, logs := plugin.(*logger); logs && *socket != "" {
		go l.obey(s)
	}
	return s.Run(context.Background())
}

func pluginOf(name, log string) (any, error) {
	switch name {
	case "logger":
		return &logger{file: log}, nil
	case "device-injector":
		return adjuster{"devices", devices}, nil
	case "ulimit-adjuster":
		return adjuster{"ulimits", ulimits}, nil
	case "hook-injector":
		return adjuster{"hooks", hooks}, nil
	case "network-device-injector":
		return adjuster{"netdevices", netDevices}, nil
	case "adjuster":
		return adjuster{"adjust", everything}, nil
	default:
		return nil, fmt.Errorf("%q is none of its names", name)
	}
}

// obey makes the updates that are on standard input, one to a line.
func (l *logger) obey(s stub.Stub) {
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		update := &api.ContainerUpdate{}
		err := protojson.Unmarshal(lines.Bytes(), update)
		var failed []*api.ContainerUpdate
		if err == nil {
			failed, err = s.UpdateContainers([]*api.ContainerUpdate{update})
		}
		if err == nil && len(failed) > 0 {
			err = errors.New("it is among those that failed")
		}
		l.write(record{Event: "UpdateContainers", Container: update.GetContainerId(), Error: fmt.Sprint(err)})
	}
}

// adjuster adjusts the containers whose pod has the annotation
// KIND.nri.test/CONTAINER.
type adjuster struct {
	kind   string
	adjust func(value string, a *api.ContainerAdjustment) error
}

func (p adjuster) CreateContainer(_ context.Context, pod *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	value, asked := pod.GetAnnotations()[p.kind+".nri.test/"+c.GetName()]
	if !asked {
		return nil, nil, nil
	}
	adjustment := &api.ContainerAdjustment{}
	if err := p.adjust(value, adjustment); err != nil {
		return nil, nil, fmt.Errorf("annotation %s of pod %s: %w", p.kind, pod.GetName(), err)
	}
	return adjustment, nil, nil
}

func everything(value string, a *api.ContainerAdjustment) error {
	return protojson.Unmarshal([]byte(value), a)
}

func devices(value string, a *api.ContainerAdjustment) error {
	var list []struct {
		Path, Type   string
		Major, Minor int64
		FileMode     uint32
	}
	err := json.Unmarshal([]byte(value), &list)
	for _, d := range list {
		a.AddDevice(&api.LinuxDevice{Path: d.Path, Type: d.Type, Major: d.Major, Minor: d.Minor, FileMode: api.FileMode(d.FileMode)})
	}
	return err
}

func ulimits(value string, a *api.ContainerAdjustment) error {
	var list []struct {
		Type       string
		Hard, Soft uint64
	}
	err := json.Unmarshal([]byte(value), &list)
	for _, l := range list {
		a.AddRlimit(l.Type, l.Hard, l.Soft)
	}
	return err
}

func hooks(value string, a *api.ContainerAdjustment) error {
	list := &api.Hooks{}
	err := protojson.Unmarshal([]byte(value), list)
	a.AddHooks(list)
	return err
}

func netDevices(value string, a *api.ContainerAdjustment) error {
	list := make(map[string]string)
	err := json.Unmarshal([]byte(value), &list)
	for onNode, inContainer := range list {
		a.AddLinuxNetDevice(onNode, &api.LinuxNetDevice{Name: inContainer})
	}
	return err
}
