package container

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// hooked asks for a device of a vendor's that has hooks.
func hooked(t *testing.T, hooks ...harness.Hook) option {
	t.Helper()
	device := harness.CDIDevice(t, hooks...)
	return func(c *runtimeapi.ContainerConfig) { c.CDIDevices = []*runtimeapi.CDIDevice{{Name: device}} }
}

var hookKinds = []string{"createRuntime", "createContainer", "startContainer", "poststart", "poststop"}

// Hooks of a CDI file run at their times, each given its own container and
// where its bundle is; also those that come after the daemon and the shim that
// made the container have died.
//
// cri: CDIDevice.name ContainerConfig.CDI_devices
func TestHooks(t *testing.T) {
	p := newPod(t)
	for _, killed := range []bool{false, true} {
		out := t.TempDir()
		check(t, os.Chmod(out, 0o777))
		var hooks []harness.Hook
		for _, kind := range hookKinds {
			dir := out
			if kind == "startContainer" {
				dir = "/out" // in the container
			}
			hooks = append(hooks, harness.Hook{Kind: kind, Script: fmt.Sprintf("cat > %s/%s", dir, kind)})
		}
		config := shell("app", forever, hooked(t, hooks...), mounted(out, "/out"))
		if killed { // and by the older way to ask
			config.Annotations, config.CDIDevices = map[string]string{"cdi.k8s.io/test": config.CDIDevices[0].Name}, nil
		}
		id := p.create(config)
		wantHooks := func(kinds ...string) {
			t.Helper()
			for _, kind := range hookKinds {
				var state specs.State
				data, err := os.ReadFile(filepath.Join(out, kind))
				if err == nil {
					check(t, json.Unmarshal(data, &state))
				}
				if ran := err == nil; ran != slices.Contains(kinds, kind) || ran && (state.ID != id || state.Bundle != filepath.Join(p.State, "containers", id)) {
					t.Errorf("%s has run: %t, when %v have to; it was told of %s in %s", kind, ran, kinds, state.ID, state.Bundle)
				}
			}
		}
		wantHooks(hookKinds[:2]...)
		if killed {
			p.Kill()
			p.killShim()
			p.Start()
			eventually(t, "it is adopted", func() bool { return p.status(id).State == created })
		}
		eventually(t, "it starts", func() bool { return p.start(id) == nil })
		wantHooks(hookKinds[:4]...)
		check(t, p.stop(id, 0))
		check(t, p.remove(id))
		wantHooks(hookKinds...)
	}
}

// A hook that hangs ends at its limit, and one whose children hold its output at that of
// the call, and leaves nothing; the supervisor continues.
func TestHookThatHangs(t *testing.T) {
	n := newNode(t, harness.Config("[limits]\ncreate = '5s'"))
	p := runPod(t, n, "web")
	witness := p.run("witness", "", command("sleep", "1000000"))
	pids := shims(n)
	for script, says := range map[string]string{"exec sleep 7776": "hook ran past specified timeout of 1.0s", "sleep 7776 & sleep 7776": ""} {
		for _, kind := range []string{"createRuntime", "createContainer", "startContainer"} {
			before := p.Look()
			config := shell("app", "true", noLog, hooked(t, harness.Hook{Kind: kind, Script: script, Seconds: 1}))
			err := p.inTime(30*time.Second, func() error {
				id, err := p.tryCreate(config)
				if err == nil {
					err = p.start(id)
					check(t, p.remove(id))
				}
				return err
			})
			if err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("%s, %q: want an error that names the limit: %v", kind, script, err)
			}
			same(t, "the supervisors", fmt.Sprint(shims(n)), fmt.Sprint(pids))
			p.exec(witness, "true")
			for _, left := range p.Differences(before) {
				t.Errorf("%s, %q: %s", kind, script, left)
			}
		}
	}
}

// Stop and removal of a pod beside a creation whose hook hangs end it, and never
// the shim.
//
// attack: what a container can stop: by hooks of the node (CDI) that hang, in its creation or start
// held: that container; its pod is removed, the supervisor and other pods go on
func TestStopBesideAHookThatHangs(t *testing.T) {
	for _, kind := range []string{"createRuntime", "createContainer"} {
		t.Run(kind, func(t *testing.T) {
			n := newNode(t)
			p, other := runPod(t, n, "web"), runPod(t, n, "other")
			witness := other.run("witness", quiet)
			p.wantExit(p.run("first", "true"), 0, "Completed")
			pids := shims(n)
			began := filepath.Join(t.TempDir(), "began")
			config := shell("app", "true", hooked(t, harness.Hook{Kind: kind, Script: "touch " + began + "; sleep 7775 & sleep 7775"}))
			made := make(chan error, 1)
			go func() {
				_, err := p.tryCreate(config)
				made <- err
			}()
			eventually(t, "the hook runs", func() bool { _, err := os.Stat(began); return err == nil })
			check(t, p.inTime(20*time.Second, p.stopPod))
			if err := <-made; err == nil {
				t.Error("the container was made")
			}
			for _, pid := range shims(n) { // one of its own goes with the pod
				if !slices.Contains(pids, pid) {
					t.Errorf("supervisors %v, before %v", shims(n), pids)
				}
			}
			other.exec(witness, "true")
			n.RemovePod(p.id)
			eventually(t, "the hook has ended, with its child", func() bool { return len(processesWithArgument(t, "7775")) == 0 })
		})
	}
}
