// Command nriplugin are NRI plugins for tests, made of the stub that others are
// made of. Its name says which one it is: logger writes down every request and
// can be made by annotations of pods to fail, to hang or to die; one of any other
// name adjusts containers as annotations say.
package main

import (
	"bufio"
	"context"
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
	var plugin any = adjuster{*name}
	if *name == "logger" {
		plugin = &logger{file: *log}
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

// adjuster adjusts the containers whose pod has the annotation NAME.nri.test/CONTAINER,
// which is the adjustment.
type adjuster struct{ name string }

func (p adjuster) CreateContainer(_ context.Context, pod *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	value, asked := pod.GetAnnotations()[p.name+".nri.test/"+c.GetName()]
	if !asked {
		return nil, nil, nil
	}
	adjustment := &api.ContainerAdjustment{}
	if err := protojson.Unmarshal([]byte(value), adjustment); err != nil {
		return nil, nil, fmt.Errorf("annotation %s of pod %s: %w", p.name, pod.GetName(), err)
	}
	return adjustment, nil, nil
}
