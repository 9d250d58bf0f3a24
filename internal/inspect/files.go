package inspect

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"

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
	containers, err := f.containers()
	if err != nil {
		return nil, err
	}
	all, err := f.heads()
	if err != nil {
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
	ids, heads, err := peekAll[podHead](filepath.Join(f.Root, "sandboxes"))
	for i, head := range heads {
		if head == nil {
			continue // the daemon reports what cannot be read
		}
		m := head.Config.Metadata
		all = append(all, headOf(ids[i], &runtimeapi.PodSandboxMetadata{Name: m.Name, Namespace: m.Namespace, Attempt: m.Attempt}))
	}
	return all, err
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
	ids, heads, err := peekAll[containerHead](filepath.Join(f.Root, "containers"))
	of := make(map[string][]timeline.Container)
	for i, head := range heads {
		if head == nil {
			continue
		}
		m := head.Config.Metadata
		of[head.SandboxID] = append(of[head.SandboxID], timeline.Container{ID: ids[i], Name: m.Name, Attempt: m.Attempt})
	}
	return of, err
}

// peekAll reads the heads of all records of a directory, on all processors; one
// that cannot be read is nil.
func peekAll[T any](directory string) (ids []string, heads []*T, err error) {
	if ids, err = idsOf(directory); err != nil {
		return nil, nil, err
	}
	heads = make([]*T, len(ids))
	var reading sync.WaitGroup
	processors := runtime.GOMAXPROCS(0)
	for first := range processors {
		reading.Go(func() {
			for i := first; i < len(ids); i += processors {
				if head, err := state.Peek[T](directory, ids[i]); err == nil {
					heads[i] = &head
				}
			}
		})
	}
	reading.Wait()
	return ids, heads, nil
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
