// Command agents finds the container of a cgroup with the agents' own functions, in a module of its own so that the
// product does not get their dependencies:
//
//	agents SOCKET CGROUP  prints the id that Datadog's agent finds by the path of a cgroup, and the id that cAdvisor
//	                      finds by the path and then at containerd's socket
//	agents                prints the id that OpenTelemetry's detector finds in the container in which it runs
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/DataDog/datadog-agent/pkg/util/cgroups"
	"github.com/google/cadvisor/lib/container"
	"github.com/google/cadvisor/lib/container/containerd"
	"github.com/google/cadvisor/lib/watcher"
	"go.opentelemetry.io/otel/sdk/resource"
)

func main() {
	find := openTelemetry
	if len(os.Args) == 3 {
		find = func() error { return byCgroup(os.Args[1], os.Args[2]) }
	}
	if err := find(); err != nil {
		fmt.Fprintln(os.Stderr, "agents:", err)
		os.Exit(1)
	}
}

func byCgroup(socket, cgroup string) error {
	id, err := cgroups.ContainerFilter(cgroup, filepath.Base(cgroup))
	if err != nil {
		return fmt.Errorf("Datadog: %w", err)
	}
	fmt.Println("Datadog", id)
	*containerd.ArgContainerdEndpoint = socket
	if err := containerd.Register(nil, nil, container.MetricSet{}); err != nil {
		return fmt.Errorf("cAdvisor: %w", err)
	}
	handler, accepted, err := container.NewContainerHandler(cgroup, watcher.Raw, nil, true)
	if err != nil || !accepted {
		return fmt.Errorf("cAdvisor: accepted %t: %w", accepted, err)
	}
	reference, err := handler.ContainerReference()
	if err != nil {
		return fmt.Errorf("cAdvisor: %w", err)
	}
	fmt.Println("cAdvisor", reference.Id)
	return nil
}

func openTelemetry() error {
	found, err := resource.New(context.Background(), resource.WithContainerID())
	if err != nil {
		return err
	}
	id, _ := found.Set().Value("container.id")
	fmt.Println("OpenTelemetry", id.AsString())
	return nil
}
