package container

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func (p *pod) reopen(id string) error {
	_, err := p.Runtime.ReopenContainerLog(limited(p.t), &runtimeapi.ReopenContainerLogRequest{ContainerId: id})
	return err
}

func TestLogFormat(t *testing.T) {
	p := newPod(t)
	const long = 40000
	id := p.run("app", fmt.Sprintf("echo out; echo err >&2; head -c %d /dev/zero | tr '\\0' x; echo; printf 'no end'", long))
	p.wantExit(id, 0, "Completed")
	stdout, stderr := p.logs(id)
	same(t, "stdout", stdout, "out\n"+strings.Repeat("x", long)+"\nno end\n")
	same(t, "stderr", stderr, "err\n")
	data, err := os.ReadFile(p.status(id).LogPath)
	check(t, err)
	if parts := strings.Count(string(data), " stdout P "); parts != 2 { // of the long line
		t.Errorf("%d partial lines", parts)
	}
	for line := range strings.Lines(string(data)) {
		if _, err := time.Parse(time.RFC3339Nano, strings.Fields(line)[0]); err != nil || len(line) > 16<<10+100 {
			t.Errorf("a line of %d bytes, time: %v", len(line), err)
		}
	}
}

func TestP39_RotationLosesNothing(t *testing.T) {
	p := newPod(t)
	const lines = 200000
	id := p.run("app", fmt.Sprintf("seq 1 %d", lines))
	path := p.status(id).LogPath
	var files []string
	for p.status(id).State == running {
		old := fmt.Sprintf("%s.%d", path, len(files))
		check(t, os.Rename(path, old))
		files = append(files, old)
		if p.reopen(id) != nil {
			break // it has just ended, and went on in the old file
		}
		time.Sleep(5 * time.Millisecond)
	}
	p.wantExit(id, 0, "Completed")
	next := 1
	for _, file := range append(files, path) {
		data, err := os.ReadFile(file)
		if os.IsNotExist(err) {
			continue // the reopen that came too late
		}
		check(t, err)
		for line := range strings.Lines(string(data)) {
			if !strings.HasSuffix(line, fmt.Sprintf(" stdout F %d\n", next)) {
				t.Fatalf("%s: line %d is %q", file, next, line)
			}
			next++
		}
	}
	if next != lines+1 || len(files) == 0 {
		t.Errorf("%d of %d lines, in %d files", next-1, lines, len(files)+1)
	}
}

func TestReopenWhileStopping(t *testing.T) {
	p := newPod(t)
	id := p.run("app", deaf)
	p.awaitLine(id, "ready")
	stopped := make(chan error, 1)
	go func() { stopped <- p.stop(id, 2) }()
	time.Sleep(100 * time.Millisecond)
	check(t, os.Rename(p.status(id).LogPath, p.status(id).LogPath+".old"))
	began := time.Now()
	check(t, p.reopen(id))
	if took := time.Since(began); took > time.Second {
		t.Errorf("reopening waited %v for the stop", took)
	}
	_, err := os.Stat(p.status(id).LogPath)
	check(t, err)
	check(t, <-stopped)
}

func TestNoLog(t *testing.T) {
	p := newPod(t)
	id := p.run("app", "echo x", func(c *runtimeapi.ContainerConfig) { c.LogPath = "" })
	p.wantExit(id, 0, "Completed")
	if path := p.status(id).LogPath; path == "" {
		t.Error("an empty log path: the kubelet would remove whatever begins with it")
	} else if _, err := os.Stat(path); err == nil {
		t.Errorf("%s exists", path)
	}
}
