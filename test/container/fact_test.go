package container

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// files are the node's records and facts, each as it was written: by the inode and
// the time of its last change. What is there of a run of plugins is left out: it ends
// with the run, and STATUS runs from time to time.
func (p *pod) files() map[string]string {
	p.t.Helper()
	found := make(map[string]string)
	for _, dir := range []string{p.Root, p.State} {
		check(p.t, filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if path == filepath.Join(p.State, "cni") {
				return fs.SkipDir
			}
			if os.IsNotExist(err) || err == nil && (entry.IsDir() || filepath.Ext(path) != ".json") {
				return nil
			}
			if err != nil {
				return err
			}
			info, err := entry.Info()
			if err == nil {
				found[path] = fmt.Sprint(info.Sys().(*syscall.Stat_t).Ino, info.ModTime())
			}
			return err
		}))
	}
	return found
}

// filesAfterTheEnd are the files when the end of a container is written, which its status
// shows before.
func (p *pod) filesAfterTheEnd(id string) (found map[string]string) {
	p.t.Helper()
	eventually(p.t, "the end is written", func() bool {
		facts, err := os.ReadFile(filepath.Join(p.Root, "container-facts", id+".json"))
		return err == nil && strings.Contains(string(facts), `"finished_at"`)
	})
	eventually(p.t, "no file changes for a while", func() bool {
		before := p.files()
		time.Sleep(200 * time.Millisecond)
		found = p.files()
		return maps.Equal(before, found)
	})
	return found
}

// What is known of pods and containers is written when it changes, and at no other
// time: not by calls that look, nor by commands, nor by a daemon or a supervisor
// that takes over.
func TestFactsAreWrittenOnlyWhenTheyChange(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	p.awaitLine(id, "ready")
	ended := p.run("ended", "exit 3")
	p.wantExit(ended, 3, "Error")
	before := p.filesAfterTheEnd(ended)
	unchanged := func(after string) {
		t.Helper()
		now := p.files()
		for path, was := range before {
			if now[path] != was {
				t.Errorf("after %s: %s was %s, is %q", after, path, was, now[path])
			}
		}
		before = now
	}
	for range 3 {
		p.exec(id, "true")
		p.list(nil)
		p.info(id)
		_, err := p.Runtime.ListContainerStats(limited(t), &runtimeapi.ListContainerStatsRequest{})
		check(t, err)
	}
	unchanged("calls")
	p.Restart()
	p.exec(id, "true")
	unchanged("a restart")
	p.Kill()
	p.Start()
	p.exec(id, "true")
	unchanged("a kill of the daemon")
	p.replaceShims(id)
	unchanged("a kill of the supervisor")
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{CpuShares: 300}))
	if now := p.files(); len(now) != len(before) || fmt.Sprint(now) == fmt.Sprint(before) {
		t.Error("an update is not written")
	}
}
