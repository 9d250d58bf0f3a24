package inspect

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/timeline"
	"github.com/minicri/minicri/sandbox"
)

// Bundle is an archive (tar.gz) of what a maintainer asks for. Every part goes
// through package redact, profiles excepted, which have no data of pods. A part
// that cannot be collected is a file with the error.
type Bundle struct {
	packed *gzip.Writer
	tar    *tar.Writer
	errs   []error
}

// NewBundle begins an archive; Close ends it.
func NewBundle(w io.Writer) *Bundle {
	packed := gzip.NewWriter(w)
	return &Bundle{packed: packed, tar: tar.NewWriter(packed)}
}

// Close ends the archive, and returns what could not be written.
func (b *Bundle) Close() error {
	return errors.Join(append(b.errs, b.tar.Close(), b.packed.Close())...)
}

func (b *Bundle) add(name string, data []byte) {
	header := &tar.Header{Name: "minicri-debug/" + name, Mode: 0o600, Size: int64(len(data)), ModTime: time.Now()}
	if err := b.tar.WriteHeader(header); err != nil {
		b.errs = append(b.errs, err)
		return
	}
	_, err := b.tar.Write(data)
	b.errs = append(b.errs, err)
}

// JSON adds a value as a document.
func (b *Bundle) JSON(name string, get func() (any, error)) {
	b.File(name, func() ([]byte, error) {
		value, err := get()
		if err != nil {
			return nil, err
		}
		data, err := json.Marshal(value)
		if err != nil {
			return nil, err
		}
		return json.MarshalIndent(redact.JSON(data), "", "  ")
	})
}

// Text adds a text.
func (b *Bundle) Text(name string, get func() (string, error)) {
	b.File(name, func() ([]byte, error) {
		text, err := get()
		return []byte(text), err
	})
}

// File adds a file; profiles stay as they are.
func (b *Bundle) File(name string, get func() ([]byte, error)) {
	data, err := get()
	switch {
	case err != nil:
		b.add(name+".missing", []byte(redact.Text(err.Error())+"\n"))
	case strings.HasSuffix(name, ".pprof"), strings.HasSuffix(name, ".json"): // which JSON has redacted
		b.add(name, data)
	default:
		b.add(name, []byte(redact.Text(string(data))))
	}
}

// Networks adds the files of a directory of network configurations to a folder of
// the archive.
func (b *Bundle) Networks(folder, directory string) {
	entries, err := os.ReadDir(directory)
	if err != nil {
		b.add(folder+".missing", []byte(err.Error()+"\n"))
		return
	}
	for _, entry := range entries {
		if !entry.Type().IsRegular() {
			continue
		}
		b.File(folder+"/"+entry.Name()+".json", func() ([]byte, error) {
			data, err := os.ReadFile(filepath.Join(directory, entry.Name()))
			return redact.JSON(data), err
		})
	}
}

// commandLimit is how long a program that describes the machine may take.
const commandLimit = 10 * time.Second

// Machine adds what the machine is and what the daemon has last logged.
func (b *Bundle) Machine(ctx context.Context) {
	for _, path := range []string{"/proc/version", "/proc/meminfo", "/proc/loadavg", "/proc/pressure/io", "/proc/pressure/cpu", "/proc/pressure/memory", "/proc/self/mountinfo", "/proc/cgroups", "/etc/os-release"} {
		b.File("machine"+strings.ReplaceAll(path, "/", "-")+".txt", func() ([]byte, error) { return os.ReadFile(path) })
	}
	for name, command := range map[string][]string{
		"journal": {"journalctl", "-u", "minicri", "-n", "5000", "--no-pager"}, "links": {"ip", "-d", "address"}, "routes": {"ip", "route", "show", "table", "all"}, "kernel": {"dmesg"},
	} {
		b.File("machine-"+name+".txt", func() ([]byte, error) {
			ctx, cancel := context.WithTimeout(ctx, commandLimit)
			defer cancel()
			return exec.CommandContext(ctx, command[0], command[1:]...).Output()
		})
	}
}

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
	pods, err := f.pods()
	if err != nil {
		return nil, err
	}
	return query(pods, step.FindLives(directory), wanted)
}

func (f Files) pods() (found []timeline.Pod, err error) {
	containers, err := f.containers()
	if err != nil {
		return nil, err
	}
	directory := filepath.Join(f.Root, "sandboxes")
	ids, err := state.IDs(directory)
	for _, id := range ids {
		record, err := state.Peek[sandbox.Record](directory, id)
		config := &runtimeapi.PodSandboxConfig{}
		if err != nil || decode(record.Config, config) != nil {
			continue // the daemon reports what cannot be read
		}
		p := headOf(id, config.GetMetadata())
		p.Containers = containers[id]
		found = append(found, f.read(p))
	}
	return found, err
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
	}
	return p
}

// containers are all containers by pod, without their lives.
func (f Files) containers() (map[string][]timeline.Container, error) {
	directory := filepath.Join(f.Root, "containers")
	ids, err := state.IDs(directory)
	of := make(map[string][]timeline.Container)
	for _, id := range ids {
		record, err := state.Peek[container.Record](directory, id)
		config := &runtimeapi.ContainerConfig{}
		if err != nil || decode(record.Config, config) != nil {
			continue
		}
		m := config.GetMetadata()
		of[record.SandboxID] = append(of[record.SandboxID], timeline.Container{ID: id, Name: m.GetName(), Attempt: m.GetAttempt(), Image: imageOf(config)})
	}
	return of, err
}

func decode(config []byte, into proto.Message) error {
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(config, into)
}
