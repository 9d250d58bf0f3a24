package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"google.golang.org/protobuf/encoding/protojson"
)

// newPlugin makes an NRI plugin, of the stub that others are made of: logger writes down every request, and
// annotations of pods make it fail, hang or die; one of any other name adjusts containers as annotations say.
func newPlugin(name, log string, options ...stub.Option) (stub.Stub, error) {
	if name != "logger" {
		return stub.New(adjuster{name}, options...)
	}
	l := &logger{file: log}
	s, err := stub.New(l, options...)
	l.Stub = s
	return s, err
}

// bePlugin runs this program as the plugin that a daemon has started.
func bePlugin(name string) {
	s, err := newPlugin(name, "")
	if err == nil {
		err = s.Run(context.Background())
	}
	fmt.Fprintln(os.Stderr, "plugin", name+":", err)
}

// seen is what a logger writes down of a request.
type seen struct {
	Event, Pod, Container, Netns, State string

	NetnsThere bool // whether something is at the path of the namespace
	IPs        []string
	Memory     int64
	Shares     uint64
	Pods       []string // those it was synchronized with
	Containers []string
}

type logger struct {
	stub.Stub
	mu   sync.Mutex
	file string // or that which its configuration names
}

func (l *logger) write(s seen) {
	l.mu.Lock()
	defer l.mu.Unlock()
	file, err := os.OpenFile(l.file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err == nil {
		err = errors.Join(json.NewEncoder(file).Encode(s), file.Close())
	}
	if err != nil {
		panic(err)
	}
}

// note writes a request down, and then does what annotations of the pod want:
// fail.nri.test, hang.nri.test and die.nri.test name an event.
func (l *logger) note(event string, pod *api.PodSandbox, c *api.Container) error {
	s := seen{Event: event, Pod: pod.GetName(), IPs: pod.GetIps(), Container: c.GetName(), State: c.GetState().String()}
	for _, namespace := range pod.GetLinux().GetNamespaces() {
		if namespace.GetType() == "network" {
			s.Netns = namespace.GetPath()
			_, err := os.Stat(s.Netns)
			s.NetnsThere = err == nil
		}
	}
	resources := c.GetLinux().GetResources()
	s.Memory, s.Shares = resources.GetMemory().GetLimit().GetValue(), resources.GetCpu().GetShares().GetValue()
	l.write(s)
	annotations := pod.GetAnnotations()
	switch event {
	case annotations["fail.nri.test"]:
		return fmt.Errorf("%s is not wanted", pod.GetName())
	case annotations["die.nri.test"]:
		l.Stop()
	case annotations["hang.nri.test"]:
		select {} // longer than it is waited for
	}
	return nil
}

func (l *logger) Configure(_ ctx, config, _, _ string) (api.EventMask, error) {
	if l.file == "" {
		l.file = config
	}
	return 0, nil
}

func (l *logger) Synchronize(_ ctx, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	s := seen{Event: "Synchronize"}
	for _, pod := range pods {
		s.Pods = append(s.Pods, pod.GetName())
	}
	for _, c := range containers {
		s.Containers = append(s.Containers, c.GetName()+" "+c.GetState().String())
	}
	l.write(s)
	return nil, nil
}

type ctx = context.Context

func (l *logger) RunPodSandbox(_ ctx, p *api.PodSandbox) error {
	return l.note("RunPodSandbox", p, nil)
}

func (l *logger) PostUpdatePodSandbox(_ ctx, p *api.PodSandbox) error {
	return l.note("PostUpdatePodSandbox", p, nil)
}

func (l *logger) StopPodSandbox(_ ctx, p *api.PodSandbox) error {
	return l.note("StopPodSandbox", p, nil)
}

func (l *logger) RemovePodSandbox(_ ctx, p *api.PodSandbox) error {
	return l.note("RemovePodSandbox", p, nil)
}

func (l *logger) UpdatePodSandbox(_ ctx, p *api.PodSandbox, _, _ *api.LinuxResources) error {
	return l.note("UpdatePodSandbox", p, nil)
}

func (l *logger) PostCreateContainer(_ ctx, p *api.PodSandbox, c *api.Container) error {
	return l.note("PostCreateContainer", p, c)
}

func (l *logger) StartContainer(_ ctx, p *api.PodSandbox, c *api.Container) error {
	return l.note("StartContainer", p, c)
}

func (l *logger) PostStartContainer(_ ctx, p *api.PodSandbox, c *api.Container) error {
	return l.note("PostStartContainer", p, c)
}

func (l *logger) PostUpdateContainer(_ ctx, p *api.PodSandbox, c *api.Container) error {
	return l.note("PostUpdateContainer", p, c)
}

func (l *logger) RemoveContainer(_ ctx, p *api.PodSandbox, c *api.Container) error {
	return l.note("RemoveContainer", p, c)
}

func (l *logger) StopContainer(_ ctx, p *api.PodSandbox, c *api.Container) ([]*api.ContainerUpdate, error) {
	return nil, l.note("StopContainer", p, c)
}

// CreateContainer answers with the annotation others.nri.test of the pod, an update of another container.
func (l *logger) CreateContainer(_ ctx, p *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	others, err := updates(p.GetAnnotations()["others.nri.test"])
	return nil, others, errors.Join(l.note("CreateContainer", p, c), err)
}

// UpdateContainer answers with the annotation update.nri.test, or with others.nri.test.
func (l *logger) UpdateContainer(_ ctx, p *api.PodSandbox, c *api.Container, _ *api.LinuxResources) ([]*api.ContainerUpdate, error) {
	own, err := updates(p.GetAnnotations()["update.nri.test"])
	if err != nil || own == nil {
		own, err = updates(p.GetAnnotations()["others.nri.test"])
	} else {
		own[0].ContainerId = c.GetId()
	}
	return own, errors.Join(l.note("UpdateContainer", p, c), err)
}

// updates is the one that a text has, if there is one.
func updates(text string) ([]*api.ContainerUpdate, error) {
	if text == "" {
		return nil, nil
	}
	one := &api.ContainerUpdate{}
	err := protojson.Unmarshal([]byte(text), one)
	return []*api.ContainerUpdate{one}, err
}

// adjuster adjusts the containers whose pod has the annotation NAME.nri.test/CONTAINER, which is the adjustment.
type adjuster struct{ name string }

func (a adjuster) CreateContainer(_ ctx, p *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	value, asked := p.GetAnnotations()[a.name+".nri.test/"+c.GetName()]
	if !asked {
		return nil, nil, nil
	}
	adjustment := &api.ContainerAdjustment{}
	return adjustment, nil, protojson.Unmarshal([]byte(value), adjustment)
}
