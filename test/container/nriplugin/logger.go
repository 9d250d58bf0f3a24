package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/encoding/protojson"
)

type record struct {
	Event     string `json:"event"`
	Pod       string `json:"pod,omitempty"`
	Container string `json:"container,omitempty"`
	Netns     string `json:"netns,omitempty"`
	// NetnsThere reports whether something is at the path of the namespace.
	NetnsThere bool     `json:"netns_there,omitempty"`
	IPs        []string `json:"ips,omitempty"`
	State      string   `json:"state,omitempty"`
	Memory     int64    `json:"memory,omitempty"`
	Shares     uint64   `json:"shares,omitempty"`
	// Pods and Containers are the names of those it was synchronized with.
	Pods       []string `json:"pods,omitempty"`
	Containers []string `json:"containers,omitempty"`
	Error      string   `json:"error,omitempty"`
}

type logger struct {
	mu   sync.Mutex
	file string
}

func (l *logger) write(r record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	file, err := os.OpenFile(l.file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err == nil {
		err = errors.Join(json.NewEncoder(file).Encode(r), file.Close())
	}
	if err != nil {
		panic(err)
	}
}

// note writes a request down, and then does what annotations of the pod want:
// fail.nri.test, hang.nri.test and die.nri.test name an event.
func (l *logger) note(ctx context.Context, event string, pod *api.PodSandbox, c *api.Container) error {
	r := record{Event: event, Pod: pod.GetName(), IPs: pod.GetIps(), Container: c.GetName()}
	for _, namespace := range pod.GetLinux().GetNamespaces() {
		if namespace.GetType() == "network" {
			r.Netns = namespace.GetPath()
			_, err := os.Stat(r.Netns)
			r.NetnsThere = err == nil
		}
	}
	if c != nil {
		r.State = c.GetState().String()
		r.Memory, r.Shares = c.GetLinux().GetResources().GetMemory().GetLimit().GetValue(), c.GetLinux().GetResources().GetCpu().GetShares().GetValue()
	}
	l.write(r)
	annotations := pod.GetAnnotations()
	switch event {
	case annotations["fail.nri.test"]:
		return fmt.Errorf("%s is not wanted", pod.GetName())
	case annotations["die.nri.test"]:
		os.Exit(1)
	case annotations["hang.nri.test"]:
		<-ctx.Done()
		select {} // longer than it is waited for
	}
	return nil
}

func (l *logger) Configure(_ context.Context, config, _, _ string) (api.EventMask, error) {
	if l.file == "" {
		l.file = config
	}
	return 0, nil
}

func (l *logger) Synchronize(_ context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	r := record{Event: "Synchronize"}
	for _, pod := range pods {
		r.Pods = append(r.Pods, pod.GetName())
	}
	for _, c := range containers {
		r.Containers = append(r.Containers, c.GetName()+" "+c.GetState().String())
	}
	l.write(r)
	return nil, nil
}

func (l *logger) RunPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return l.note(ctx, "RunPodSandbox", pod, nil)
}

func (l *logger) UpdatePodSandbox(ctx context.Context, pod *api.PodSandbox, _, resources *api.LinuxResources) error {
	l.write(record{Event: "asked for the pod", Shares: resources.GetCpu().GetShares().GetValue()})
	return l.note(ctx, "UpdatePodSandbox", pod, nil)
}

func (l *logger) PostUpdatePodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return l.note(ctx, "PostUpdatePodSandbox", pod, nil)
}

func (l *logger) StopPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return l.note(ctx, "StopPodSandbox", pod, nil)
}

func (l *logger) RemovePodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return l.note(ctx, "RemovePodSandbox", pod, nil)
}

func (l *logger) CreateContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	if err := l.note(ctx, "CreateContainer", pod, c); err != nil {
		return nil, nil, err
	}
	others, err := update(pod, "others.nri.test")
	return nil, others, err
}

func (l *logger) PostCreateContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
	return l.note(ctx, "PostCreateContainer", pod, c)
}

func (l *logger) StartContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
	return l.note(ctx, "StartContainer", pod, c)
}

func (l *logger) PostStartContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
	return l.note(ctx, "PostStartContainer", pod, c)
}

// update is the one that an annotation of the pod has, if there is one.
func update(pod *api.PodSandbox, annotation string) ([]*api.ContainerUpdate, error) {
	wanted := pod.GetAnnotations()[annotation]
	if wanted == "" {
		return nil, nil
	}
	one := &api.ContainerUpdate{}
	err := protojson.Unmarshal([]byte(wanted), one)
	return []*api.ContainerUpdate{one}, err
}

// UpdateContainer answers with the annotation update.nri.test of the pod, or with
// others.nri.test, of another container.
func (l *logger) UpdateContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container, asked *api.LinuxResources) ([]*api.ContainerUpdate, error) {
	l.write(record{Event: "asked for the container", Memory: asked.GetMemory().GetLimit().GetValue(), Shares: asked.GetCpu().GetShares().GetValue()})
	if err := l.note(ctx, "UpdateContainer", pod, c); err != nil {
		return nil, err
	}
	own, err := update(pod, "update.nri.test")
	if err != nil || own == nil {
		return update(pod, "others.nri.test")
	}
	own[0].ContainerId = c.GetId()
	return own, nil
}

func (l *logger) PostUpdateContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
	return l.note(ctx, "PostUpdateContainer", pod, c)
}

func (l *logger) StopContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) ([]*api.ContainerUpdate, error) {
	return nil, l.note(ctx, "StopContainer", pod, c)
}

func (l *logger) RemoveContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
	return l.note(ctx, "RemoveContainer", pod, c)
}
