package runtime

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// taskKnown is what a successor has to know of the container.
type taskKnown struct {
	taskAddress
	Program []string          `json:"program,omitempty"` // none in files of earlier builds
	Shim    shimProcess       `json:"shim"`
	Cgroups map[string]string `json:"cgroups"` // by controller, "" for version 2; none if not of the node
}

// shimProcess is the process of a shim.
type shimProcess struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"`
}

// taskFile has what is known of a container, in its bundle.
const taskFile = "task.json"

// TaskProgram is the program, and its arguments, of the shim that a bundle was made
// for, nil if the bundle does not say it.
func TaskProgram(bundle string) []string {
	var known taskKnown
	content, err := os.ReadFile(filepath.Join(bundle, taskFile))
	if err != nil || json.Unmarshal(content, &known) != nil {
		return nil
	}
	return known.Program
}

func (c *taskContainer) file() string { return filepath.Join(c.bundle, taskFile) }

// joinShim connects to the shim that the pod has already, if it is one of which it is
// known that its verb "start" would do no more than to find that.
func (c *taskContainer) joinShim(spec *specs.Spec) bool {
	pod := spec.Annotations[podAnnotation]
	if filepath.Base(c.runtime.program[0]) != runcShim || spec.Annotations[groupAnnotation] != "" || pod == c.id || pod != filepath.Base(pod) {
		return false
	}
	ofPod := taskContainer{bundle: filepath.Join(c.runtime.bundles, pod)}
	content, err := os.ReadFile(ofPod.file())
	if err != nil || json.Unmarshal(content, &ofPod.known) != nil || !slices.Equal(ofPod.known.Program, c.runtime.program) {
		return false
	}
	if known, is := c.runtime.shimAt(ofPod.known.Address); !is || known != ofPod.known.Shim {
		return false
	}
	c.noteAddress(ofPod.known.taskAddress)
	// The shim itself writes the file where it starts.
	path := filepath.Join(c.bundle, addressFile)
	return os.WriteFile(path, []byte(c.known.Address), 0o600) == nil && c.connect() == nil
}

// Annotations by which containerd-shim-runc-v2 knows which containers it has together.
// If a container has both, the group counts.
const (
	podAnnotation   = "io.kubernetes.cri.sandbox-id"
	groupAnnotation = "io.containerd.runc.v2.group"
)

// Load is of Runtime.
func (r *Task) Load(id string) (Container, error) {
	c := &taskContainer{runtime: r, id: id, bundle: filepath.Join(r.bundles, id), made: true}
	content, err := os.ReadFile(c.file())
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("load container %s: %w: %w", id, errdefs.ErrNotFound, err)
	}
	if err == nil {
		err = json.Unmarshal(content, &c.known)
	}
	if err == nil {
		r.keepShim(c.known.Address, c.known.Shim)
		c.execCgroups = newExecCgroups(c.known.Cgroups, c.bundle)
		err = r.events.serve()
	}
	if err == nil {
		c.log, err = openTaskLog(c.bundle)
	}
	if err == nil {
		err = c.connect()
	}
	if err != nil {
		if c.log != nil {
			c.log.close()
		}
		return nil, fmt.Errorf("load container %s: %w", id, err)
	}
	return c, nil
}

// Discard is of Runtime: the shim is asked, as long as it serves, because it would not
// end while it knows the container; else its own verb removes what it has left.
func (r *Task) Discard(id string) error {
	c := &taskContainer{runtime: r, id: id, bundle: filepath.Join(r.bundles, id), made: true}
	if address, err := os.ReadFile(filepath.Join(c.bundle, addressFile)); err == nil {
		c.known.taskAddress = taskAddress{Address: strings.TrimSpace(string(address)), Version: 2}
		_ = c.connect() // it may have ended
	}
	return c.Delete()
}

// addressFile is where a shim writes the address at which it serves, in the bundle
// (https://github.com/containerd/containerd/blob/main/core/runtime/v2/README.md).
const addressFile = "address"
