package inspect

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/timeline"
	"github.com/minicri/minicri/sandbox"
)

// Files are the directories of a daemon that does not run: what it has written
// last is what is known.
type Files struct {
	Root, State string
	// Netns is the path of a pod's network namespace.
	Netns func(id string) string
}

// Timelines are the pods that are asked for; see query.
func (f Files) Timelines(wanted string) ([]timeline.Pod, error) {
	directory := filepath.Join(f.Root, "lives")
	if _, err := os.Stat(f.Root); err != nil {
		return nil, err
	}
	lives, err := step.OpenLives(directory)
	if err != nil {
		return nil, err
	}
	return query(f, lives, wanted)
}

// podHead and containerHead are what is read of the records of all pods and
// containers, to find those that are asked for.
type podHead struct {
	Config struct {
		Metadata struct {
			Name, Namespace string
			Attempt         uint32
		}
	}
}

type containerHead struct {
	SandboxID string `json:"sandbox_id"`
	Config    struct {
		Metadata struct {
			Name    string
			Attempt uint32
		}
	}
}

func (f Files) pods(match func(timeline.Pod) bool) (found []timeline.Pod, err error) {
	var containers map[string][]timeline.Container
	var reading errgroup.Group // on a second processor
	reading.Go(func() (err error) { containers, err = f.containers(); return err })
	all, err := f.heads()
	if err := errors.Join(err, reading.Wait()); err != nil {
		return nil, err
	}
	for _, p := range all {
		p.Containers = containers[p.ID]
		if match(p) {
			found = append(found, f.read(p))
		}
	}
	return found, nil
}

// heads are the names of all pods.
func (f Files) heads() (all []timeline.Pod, err error) {
	ids, err := idsOf(filepath.Join(f.Root, "sandboxes"))
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		head, err := state.Peek[podHead](filepath.Join(f.Root, "sandboxes"), id)
		if err != nil {
			continue // the daemon reports what cannot be read
		}
		m := head.Config.Metadata
		all = append(all, headOf(id, &runtimeapi.PodSandboxMetadata{Name: m.Name, Namespace: m.Namespace, Attempt: m.Attempt}))
	}
	return all, nil
}

// read reads all that is known of a pod and its containers.
func (f Files) read(p timeline.Pod) timeline.Pod {
	facts, err := state.Peek[sandbox.Facts](filepath.Join(f.State, "facts"), p.ID)
	p.State, p.Rows = stateOf(&facts, err != nil), facts.Timeline
	for _, address := range facts.Addresses {
		p.Addresses = append(p.Addresses, address.String())
	}
	p.Network = networkOf(f.Root, p.ID, f.Netns(p.ID), facts.CNIResult)
	for i, c := range p.Containers {
		facts, _ := state.Peek[container.Facts](filepath.Join(f.Root, "container-facts"), c.ID) // none: it was being made
		p.Containers[i].State, p.Containers[i].Rows = containerState(&facts), facts.Timeline
		record, err := state.Peek[container.Record](filepath.Join(f.Root, "containers"), c.ID)
		config := &runtimeapi.ContainerConfig{}
		if err == nil && decode(record.Config, config) == nil {
			p.Containers[i].Image = imageOf(config)
		}
	}
	return p
}

// containers are the names of all containers, by pod.
func (f Files) containers() (map[string][]timeline.Container, error) {
	ids, err := idsOf(filepath.Join(f.Root, "containers"))
	if err != nil {
		return nil, err
	}
	of := make(map[string][]timeline.Container)
	for _, id := range ids {
		head, err := state.Peek[containerHead](filepath.Join(f.Root, "containers"), id)
		if err != nil {
			continue
		}
		m := head.Config.Metadata
		of[head.SandboxID] = append(of[head.SandboxID], timeline.Container{ID: id, Name: m.Name, Attempt: m.Attempt})
	}
	return of, nil
}

func decode(config []byte, into proto.Message) error {
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(config, into)
}

// idsOf lists a directory that may not be there.
func idsOf(directory string) ([]string, error) {
	ids, err := state.IDs(directory)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return ids, err
}
