package kubelet

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// startPlugins switches NRI on, under the pods that run: with a plugin that writes
// down what it hears, and one that adjusts containers as annotations say. The
// daemon starts them, in each of its lives.
func (k *kubelet) startPlugins() {
	for _, dir := range []string{"nri", "nri/plugins", "nri/conf", "nri/given"} {
		check(k.t, os.Mkdir(k.path(dir), 0o755))
	}
	check(k.t, os.WriteFile(k.path("nri/given/file"), []byte("a mount of a plugin\n"), 0o644))
	program := k.path("nri/plugin")
	build := exec.Command("go", "build", "-tags", "nri_no_wasm", "-o", program, "../container/nriplugin")
	if output, err := build.CombinedOutput(); err != nil {
		k.t.Fatalf("%v: %v: %s", build, err, output)
	}
	for _, name := range []string{"05-logger", "10-adjuster"} {
		check(k.t, os.Link(program, k.path("nri/plugins/"+name)))
	}
	check(k.t, os.WriteFile(k.path("nri/conf/logger.conf"), []byte(k.path("nri/log")), 0o644))
	check(k.t, os.Mkdir(filepath.Join(k.Dir, "config.toml.d"), 0o755))
	k.switchNRI(true)
	eventually(k.t, "the plugins are there", func() bool { return len(k.plugins()) == 2 })
	first := k.heard("Synchronize", "", "")
	if len(first) != 1 || !slices.Contains(first[0].Pods, "pair-"+nodeName) || !slices.Contains(first[0].Containers, "server CONTAINER_RUNNING") {
		k.t.Errorf("the plugin was synchronized with %+v", first)
	}
}

func (k *kubelet) switchNRI(on bool) {
	keys := fmt.Sprintf("[nri]\nenabled = %t\nsocket = ''\nplugin_dir = '%s'\nconfig_dir = '%s'\n", on, k.path("nri/plugins"), k.path("nri/conf"))
	check(k.t, os.WriteFile(filepath.Join(k.Dir, "config.toml.d/nri.toml"), []byte(keys), 0o600))
	check(k.t, unix.Kill(k.PID(), unix.SIGHUP))
}

// stopPlugins switches NRI off: what it had is given back.
func (k *kubelet) stopPlugins() {
	k.switchNRI(false)
	eventually(k.t, "the plugins are gone", func() bool { return len(k.plugins()) == 0 })
}

func (k *kubelet) plugins() (names []string) {
	k.t.Helper()
	return harness.Info[[]string](k.t, k.Node, "nriPlugins")
}

// heard are the requests of a kind about a pod, or a container of it, that the
// logger has written down. A line that is being written is not read yet.
func (k *kubelet) heard(event, pod, container string) (found []heard) {
	k.t.Helper()
	data, err := os.ReadFile(k.path("nri/log"))
	check(k.t, err)
	data = data[:bytes.LastIndexByte(data, '\n')+1]
	for line := range bytes.Lines(data) {
		var one heard
		check(k.t, json.Unmarshal(line, &one))
		if one.Event == event && one.Pod == pod && one.Container == container {
			found = append(found, one)
		}
	}
	return found
}

type heard struct {
	Event, Pod, Container, Netns string

	IPs, Pods, Containers []string
}

// applyAdjusted makes a pod that a plugin gives a variable and a mount.
func (k *kubelet) applyAdjusted() {
	adjustment := fmt.Sprintf(`{"annotations": {"from": "nri"}, "env": [{"key": "FROM", "value": "nri"}],
		"mounts": [{"destination": "/given", "type": "bind", "source": %q, "options": ["rbind", "ro"]}]}`, k.path("nri/given"))
	k.applyAnnotated("adjusted", map[string]string{"adjuster.nri.test/app": adjustment}, containers(shell("app", "echo $FROM; cat /given/file"+forever)))
}

// checkAdjusted looks at what the container has of it, in each life of the daemon.
func (k *kubelet) checkAdjusted() {
	pod := k.awaitReady("adjusted")
	eventually(k.t, "the container says what it has", func() bool { return k.logs("adjusted", "app", "") == "nri\na mount of a plugin\n" })
	same(k.t, "what a command sees", strings.TrimSpace(k.run("adjusted", "app", "cat /given/file")), "a mount of a plugin")
	if mounts := k.inRuntime("adjusted", "app").GetMounts(); slices.ContainsFunc(mounts, func(m *runtimeapi.Mount) bool { return m.ContainerPath == "/given" }) {
		k.t.Errorf("the kubelet is shown a mount that it has not asked for: %v", mounts)
	}
	ran := k.heard("RunPodSandbox", "adjusted-"+nodeName, "")
	if len(ran) != 1 || ran[0].Netns == "" || !slices.Equal(ran[0].IPs, []string{pod.Status.PodIP}) {
		k.t.Errorf("the plugin has heard of the pod %+v, whose address is %s", ran, pod.Status.PodIP)
	}
}

// checkPluginsHeard: of a pod of both lives of the daemon the plugins heard each
// thing once, and each life told them what there was.
func (k *kubelet) checkPluginsHeard() {
	name := "adjusted-" + nodeName
	for _, event := range []string{"RunPodSandbox", "StopPodSandbox", "RemovePodSandbox"} {
		if times := len(k.heard(event, name, "")); times != 1 {
			k.t.Errorf("the plugin has heard of %s %d times", event, times)
		}
	}
	for _, event := range []string{"CreateContainer", "StartContainer", "StopContainer", "RemoveContainer"} {
		if times := len(k.heard(event, name, "app")); times != 1 {
			k.t.Errorf("the plugin has heard of %s %d times", event, times)
		}
	}
	lives := k.heard("Synchronize", "", "")
	if len(lives) != 2 || !slices.Contains(lives[1].Pods, name) {
		k.t.Errorf("the plugin was synchronized with %+v", lives)
	}
}
