package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
)

// A move of a process into a cgroup takes a lock of the whole kernel
// (cgroup_threadgroup_rwsem). The first one after a quiet moment waits for an
// RCU grace period, which no process can shorten; those that follow
// within some milliseconds do not. Containers, and pauses with a user namespace,
// are moved; other pauses move themselves, without that lock, so a Run after a
// move must not be faster.
const (
	firstMove = "first move into a cgroup"
	nextMove  = "the move after it"
	warmRun   = hostNetwork + "Run after a move"
	// quietTime is how long the kernel takes to forget the last move.
	quietTime = 100 * time.Millisecond
)

// moves measures the two moves, and a Run whose moves need not wait because the
// benchmark has waited for them.
func (m *measurement) moves(ctx context.Context, round int) error {
	time.Sleep(quietTime)
	for _, name := range []string{firstMove, nextMove} {
		if err := m.time(name, m.move); err != nil {
			return err
		}
	}
	config := m.node.Pod(fmt.Sprintf("warm-%d", round), runtimeapi.NamespaceMode_NODE)
	var id string
	err := m.time(warmRun, func() (err error) {
		id, err = m.run(ctx, config)
		return err
	})
	if err != nil {
		return err
	}
	_, err = m.node.Client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	return err
}

// move moves this process into a cgroup of its own.
func (m *measurement) move() error {
	return os.WriteFile(filepath.Join(m.mine.Dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0)
}

// enterGroup makes the cgroup that move moves to and fro.
func (m *measurement) enterGroup() (leave func() error, err error) {
	own, err := cgroup.GroupParent("")
	if err != nil {
		return nil, err
	}
	m.mine = own.Child(filepath.Base(m.node.Dir) + "-moves")
	return func() error {
		back := os.WriteFile(filepath.Join(own.Dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0)
		if back != nil {
			return back
		}
		return m.mine.Remove()
	}, m.mine.Make()
}
