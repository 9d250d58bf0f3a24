package inspect

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

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

func (f Files) pods(match func(timeline.Pod) bool) (found []timeline.Pod, err error) {
	ids, err := idsOf(filepath.Join(f.Root, "sandboxes"))
	if err != nil {
		return nil, err
	}
	containers, err := f.containers()
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		record, err := state.Peek[sandbox.Record](filepath.Join(f.Root, "sandboxes"), id)
		config := &runtimeapi.PodSandboxConfig{}
		if err != nil || decode(record.Config, config) != nil {
			continue // the daemon reports what cannot be read
		}
		p := headOf(id, config.GetMetadata())
		p.Containers = containers[id]
		if !match(p) {
			continue
		}
		facts, err := state.Peek[sandbox.Facts](filepath.Join(f.State, "facts"), id)
		p.State, p.Rows = stateOf(&facts, err != nil), facts.Timeline
		for _, address := range facts.Addresses {
			p.Addresses = append(p.Addresses, address.String())
		}
		p.Network = networkOf(f.Root, id, f.Netns(id), facts.CNIResult)
		found = append(found, p)
	}
	return found, nil
}

// containers are all containers, by pod.
func (f Files) containers() (map[string][]timeline.Container, error) {
	ids, err := idsOf(filepath.Join(f.Root, "containers"))
	if err != nil {
		return nil, err
	}
	of := make(map[string][]timeline.Container)
	for _, id := range ids {
		record, err := state.Peek[container.Record](filepath.Join(f.Root, "containers"), id)
		config := &runtimeapi.ContainerConfig{}
		if err != nil || decode(record.Config, config) != nil {
			continue
		}
		facts, _ := state.Peek[container.Facts](filepath.Join(f.Root, "container-facts"), id) // none: it was being made
		of[record.SandboxID] = append(of[record.SandboxID], timeline.Container{
			ID: id, Name: config.GetMetadata().GetName(), Attempt: config.GetMetadata().GetAttempt(), State: containerState(&facts), Image: imageOf(config), Rows: facts.Timeline,
		})
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
