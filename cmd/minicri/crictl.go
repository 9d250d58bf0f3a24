package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/manual"
)

// named are the pods and containers of a name, or with the beginning of an id.
type named struct {
	pods       []*runtimeapi.PodSandbox
	containers []*runtimeapi.Container
}

// find lists the objects of a name with the daemon: NAME, NAMESPACE/NAME, NAMESPACE/POD/CONTAINER, or the beginning of
// an id.
func find(ctx context.Context, daemon runtimeapi.RuntimeServiceClient, name string) (named, error) {
	pods, err := daemon.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return named{}, withoutCode(err)
	}
	containers, err := daemon.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return named{}, withoutCode(err)
	}
	var found named
	nameOf := make(map[string]string) // pod id to NAMESPACE/NAME
	for _, pod := range pods.GetItems() {
		m := pod.GetMetadata()
		full := m.GetNamespace() + "/" + m.GetName()
		nameOf[pod.GetId()] = full
		if strings.HasPrefix(pod.GetId(), name) || m.GetName() == name || full == name {
			found.pods = append(found.pods, pod)
		}
	}
	for _, c := range containers.GetContainers() {
		own := c.GetMetadata().GetName()
		if strings.HasPrefix(c.GetId(), name) || own == name || nameOf[c.GetPodSandboxId()]+"/"+own == name {
			found.containers = append(found.containers, c)
		}
	}
	return found, nil
}

// inspectCommand prints the verbose status of all objects of the names.
func inspectCommand(cmd *cobra.Command, names []string) error {
	c, err := look(cmd)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), askLimit)
	defer cancel()
	serves, err := daemonServes(ctx, c.Socket)
	if err != nil {
		return err
	}
	if !serves {
		return noDaemon(c.Socket)
	}
	daemon, err := daemonAt(ctx, c.Socket)
	if err != nil {
		return err
	}
	objects := []map[string]any{}
	for _, name := range names {
		found, err := find(ctx, daemon, name)
		if err != nil {
			return fmt.Errorf("inspect %q: %w", name, err)
		}
		if len(found.pods)+len(found.containers) == 0 {
			return fmt.Errorf("inspect %q: no pod or container has this name or id: see 'minicri pods'", name)
		}
		for _, pod := range found.pods {
			request := &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod.GetId(), Verbose: true}
			answer, err := daemon.PodSandboxStatus(ctx, request)
			if err != nil {
				return fmt.Errorf("inspect pod %s: %w", pod.GetId(), withoutCode(err))
			}
			objects = append(objects, describe("pod", answer.GetStatus(), answer.GetInfo()))
		}
		for _, one := range found.containers {
			request := &runtimeapi.ContainerStatusRequest{ContainerId: one.GetId(), Verbose: true}
			answer, err := daemon.ContainerStatus(ctx, request)
			if err != nil {
				return fmt.Errorf("inspect container %s: %w", one.GetId(), withoutCode(err))
			}
			objects = append(objects, describe("container", answer.GetStatus(), answer.GetInfo()))
		}
	}
	switch form := c.text("output"); form {
	case "json":
		return writeJSON(cmd.OutOrStdout(), objects)
	case "yaml":
		return writeYAML(cmd.OutOrStdout(), objects)
	default:
		return manual.Misused("-o %s: the forms are json and yaml", form)
	}
}

func describe(kind string, status any, info map[string]string) map[string]any {
	object := map[string]any{"kind": kind, "status": status}
	for key, text := range info {
		object[key] = json.RawMessage(text)
	}
	return object
}

// crictlCommand answers a verb that minicri leaves to crictl with the command to use.
func crictlCommand(cmd *cobra.Command, arguments []string) error {
	verb, rest := cmd.Name(), slices.Clone(arguments)
	if i := slices.IndexFunc(rest, func(word string) bool { return !strings.HasPrefix(word, "-") }); i >= 0 {
		rest[i] = idNamed(cmd.Context(), verb, rest[i])
	} else {
		rest = append(rest, "ID")
	}
	return manual.Misused("minicri has no command %q: use crictl %s %s", verb, verb, strings.Join(rest, " "))
}

// idNamed returns the id of the only object of a name that the verb takes, or the name.
func idNamed(ctx context.Context, verb, name string) string {
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	daemon, err := daemonAt(ctx, config.Default().Socket)
	if err != nil {
		return name
	}
	found, err := find(ctx, daemon, name)
	if err != nil {
		return name
	}
	ids := []string{}
	for _, pod := range found.pods {
		if slices.Contains([]string{"port-forward", "rmp", "stopp"}, verb) {
			ids = append(ids, pod.GetId())
		}
	}
	for _, c := range found.containers {
		if slices.Contains([]string{"attach", "exec", "logs", "rm", "start", "stats", "stop"}, verb) {
			ids = append(ids, c.GetId())
		}
	}
	if len(ids) != 1 {
		return name
	}
	return ids[0][:min(13, len(ids[0]))]
}
