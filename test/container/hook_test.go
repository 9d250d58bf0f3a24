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

// vendor writes a CDI file of one device with hooks, and returns the device's
// name. Each hook is a shell script.
func vendor(t *testing.T, hooks map[string]string, timeout int) string {
	t.Helper()
	var list []harness.Hook
	for kind, script := range hooks {
		list = append(list, harness.Hook{Kind: kind, Script: script, Seconds: timeout})
	}
	return harness.CDIDevice(t, list...)
}

func byField(device string) option {
	return func(c *runtimeapi.ContainerConfig) { c.CDIDevices = []*runtimeapi.CDIDevice{{Name: device}} }
}

func byAnnotation(device string) option {
	return func(c *runtimeapi.ContainerConfig) { c.Annotations = map[string]string{"cdi.k8s.io/test": device} }
}

var hookKinds = []string{"createRuntime", "createContainer", "startContainer", "poststart", "poststop"}

// Hooks of a CDI file run at their times, each given its own container and
// where its bundle is; also those that come after the daemon and the shim that
// made the container have died.
//
// cri: CDIDevice.name ContainerConfig.CDI_devices
func TestHooks(t *testing.T) {
	p := newPod(t)
	for name, by := range map[string]func(string) option{"field": byField, "annotation": byAnnotation} {
		for _, killed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, killed %t", name, killed), func(t *testing.T) {
				out := t.TempDir()
				check(t, os.Chmod(out, 0o777))
				hooks := make(map[string]string)
				for _, kind := range hookKinds {
					hooks[kind] = fmt.Sprintf("cat > %s/%s", out, kind)
				}
				hooks["startContainer"] = "cat > /out/startContainer" // in the container
				p := *p
				p.t = t
				config := shell("app", forever, by(vendor(t, hooks, 0)), mounted(out, "/out"))
				id := p.create(config)
				bundle := filepath.Join(p.State, "containers", id)
				wantStates(t, out, id, bundle, hookKinds[:2]...)
				if killed {
					p.Kill()
					p.killShim()
					p.Start()
					eventually(t, "it is adopted", func() bool { return p.status(id).State == created })
				}
				eventually(t, "it starts", func() bool { return p.start(id) == nil })
				wantStates(t, out, id, bundle, hookKinds[:4]...)
				check(t, p.stop(id, 0))
				check(t, p.remove(id))
				wantStates(t, out, id, bundle, hookKinds...)
			})
		}
	}
}

// wantStates fails the test unless these hooks have run and no others.
func wantStates(t *testing.T, out, id, bundle string, kinds ...string) {
	t.Helper()
	for _, kind := range hookKinds {
		data, err := os.ReadFile(filepath.Join(out, kind))
		if ran := err == nil; ran != slices.Contains(kinds, kind) {
			t.Errorf("%s has run: %t, when %v have to", kind, ran, kinds)
			continue
		}
		if err != nil {
			continue
		}
		var state specs.State
		check(t, json.Unmarshal(data, &state))
		if state.ID != id || state.Bundle != bundle {
			t.Errorf("%s was told of %s in %s, want %s in %s", kind, state.ID, state.Bundle, id, bundle)
		}
	}
}

// A hook that hangs ends at its limit, and one whose children hold its output at that of
// the call, and leaves nothing; the supervisor continues.
func TestHookThatHangs(t *testing.T) {
	hangs := map[string]string{
		"alone":    "exec sleep 7776",
		"children": "sleep 7776 & sleep 7776",
	}
	n := newNode(t, harness.Config("[limits]\ncreate = '5s'"))
	p := runPod(t, n, "web")
	witness := p.run("witness", "", command("sleep", "1000000"))
	pids := shims(n)
	for how, script := range hangs {
		for _, kind := range []string{"createRuntime", "createContainer", "startContainer"} {
			t.Run(kind+" "+how, func(t *testing.T) {
				before := p.Look()
				device := vendor(t, map[string]string{kind: script}, 1)
				err := p.inTime(30*time.Second, func() error {
					id, err := p.tryCreate(shell("app", "true", byField(device), func(c *runtimeapi.ContainerConfig) { c.LogPath = "" }))
					if err == nil {
						err = p.start(id)
						check(t, p.remove(id))
					}
					return err
				})
				if err == nil || how == "alone" && !strings.Contains(err.Error(), "hook ran past specified timeout of 1.0s") {
					t.Errorf("want an error that names the limit: %v", err)
				}
				same(t, "the supervisors", fmt.Sprint(shims(n)), fmt.Sprint(pids))
				p.exec(witness, "true")
				for _, left := range p.Differences(before) {
					t.Error(left)
				}
			})
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
			device := vendor(t, map[string]string{kind: "touch " + began + "; sleep 7775 & sleep 7775"}, 0)
			made := make(chan error, 1)
			go func() {
				_, err := p.tryCreate(shell("app", "true", byField(device)))
				made <- err
			}()
			eventually(t, "the hook runs", func() bool {
				_, err := os.Stat(began)
				return err == nil
			})
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
