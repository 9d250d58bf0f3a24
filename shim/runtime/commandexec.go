package runtime

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

const verbExec = "exec"

// Exec is of Container. Where the runtime cannot put an exec into a cgroup of
// its own, only the process itself is ended by KillTree.
func (c *commandContainer) Exec(spec *specs.Process, streams Streams) (*Process, error) {
	scratch, err := os.MkdirTemp(c.bundle, "process-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(scratch)
	process, passed, err := withBytes(withOOMScoreAdj(c.bundle, spec), c.MountLabel())
	if err != nil {
		return nil, err
	}
	defer passed.Close()
	file := filepath.Join(scratch, "process.json")
	if err := writeJSON(file, process); err != nil {
		return nil, err
	}
	arguments := []string{"--detach", "--process", file}
	t := c.runtime.execTree(c.execs)
	if t != nil {
		arguments = append(arguments, "--cgroup", c.runtime.execCgroupFlag(t))
	}
	p, err := c.launch(streams, passed, verbExec, arguments...)
	if err != nil {
		if t != nil {
			t.close()
		}
		return nil, err
	}
	p.tree = t
	return p, nil
}

// execCgroupForm is how a runtime takes the cgroup of an exec.
type execCgroupForm int

const (
	noExecCgroups    execCgroupForm = iota // it does not
	execCgroupPath                         // --cgroup PATH, below the container's, version 2 alone: crun
	execCgroupByName                       // --cgroup [CONTROLLER:]PATH: runc
)

// askExecCgroups asks the runtime itself, by the help of its verb.
func askExecCgroups(path string, children *children) execCgroupForm {
	var help []byte
	_ = children.during(func() (err error) {
		help, err = exec.Command(path, "exec", "--help").CombinedOutput()
		return err // a runtime that has no help has no such flag
	})
	switch text := string(help); {
	case !strings.Contains(text, "--cgroup"):
		return noExecCgroups
	case strings.Contains(text, "controller"):
		return execCgroupByName
	default:
		return execCgroupPath
	}
}

// execTree makes a cgroup for an exec, nil if the runtime cannot use one.
func (r *Command) execTree(of *execCgroups) *tree {
	_, v2 := of.cgroups[""]
	switch r.execCgroups() {
	case execCgroupByName:
		return of.newTree()
	case execCgroupPath:
		if v2 {
			return of.newTree()
		}
	}
	return nil
}

// execCgroupFlag is the value of --cgroup.
func (r *Command) execCgroupFlag(t *tree) string {
	if t.controller == "" || r.execCgroups() == execCgroupPath {
		return t.sub
	}
	return t.controller + ":" + t.sub
}
