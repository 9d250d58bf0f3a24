package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/bench/contender"
)

// density is what held pods cost.
type density struct {
	runAll, endAll time.Duration
	memoryPerPod   float64 // KiB
	processes      int
	daemon         int // KiB
}

// hold runs many pods, several at a time, weighs them, and ends them.
func (m *measurement) hold(ctx context.Context) (density, error) {
	var d density
	ids := make([]string, held)
	began := time.Now()
	err := contender.Parallel(held, func(i int) (err error) {
		ids[i], err = m.run(ctx, m.node.Pod(fmt.Sprintf("held-%d", i), runtimeapi.NamespaceMode_POD))
		return err
	})
	d.runAll = time.Since(began)
	if err != nil {
		return d, err
	}
	contender.Check(m.weigh(ctx, ids, &d))
	began = time.Now()
	err = contender.Parallel(held, func(i int) error {
		_, err := m.node.Client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: ids[i]})
		return err
	})
	d.endAll = time.Since(began)
	return d, err
}

// weigh adds up all processes that are there because of the pods: everything
// that descends from the daemon, and what runs in the pods' cgroups.
func (m *measurement) weigh(ctx context.Context, ids []string, d *density) error {
	d.daemon = contender.Must(contender.Memory(m.node.PID()))
	processes := contender.Must(descendants(m.node.PID()))
	for _, id := range ids {
		pid := contender.Must(m.pausePID(ctx, id))
		processes[pid] = true
	}
	total := 0
	for pid := range processes {
		kib, err := contender.Memory(pid)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			delete(processes, pid) // a shim on its way out
			continue
		}
		if err != nil {
			return err
		}
		total += kib
	}
	d.processes = len(processes)
	d.memoryPerPod = float64(total) / float64(len(ids))
	return nil
}

func (m *measurement) pausePID(ctx context.Context, id string) (int, error) {
	response := contender.Must(m.node.Client.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true}))
	var info struct{ PID int }
	err := json.Unmarshal([]byte(response.GetInfo()["info"]), &info)
	return info.PID, err
}

func descendants(of int) (map[int]bool, error) {
	found := make(map[int]bool)
	files := contender.Must(filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", of)))
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			continue // the thread has ended
		}
		for _, field := range strings.Fields(string(data)) {
			pid := contender.Must(strconv.Atoi(field))
			found[pid] = true
			below := contender.Must(descendants(pid))
			for pid := range below {
				found[pid] = true
			}
		}
	}
	return found, nil
}
