package kubelet

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// gracePeriod is what the graceful pod is given, far more than it needs.
const gracePeriod = 10 * time.Minute

// applyGraceful makes a pod that needs a second to end.
func (k *kubelet) applyGraceful() {
	const script = "trap 'echo SIGTERM >>/out/log; sleep 1; echo done >>/out/log; exit 7' TERM; echo ready >/out/log; while true; do sleep 0.1; done"
	app := shell("app", script, mounted("out"), readiness(command("test", "-s", "/out/log")))
	app.Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{
		Exec: &corev1.ExecAction{Command: []string{"sh", "-c", "echo preStop >>/out/log"}},
	}}
	spec := containers(app)
	seconds := int64(gracePeriod.Seconds())
	spec.TerminationGracePeriodSeconds = &seconds
	spec.Volumes = []corev1.Volume{hostPath("out", k.path("out"))}
	k.apply("graceful", spec)
}

func (k *kubelet) checkGracefulDeletion() {
	pod := k.awaitReady("graceful")
	cgroups := k.cgroups(string(pod.UID))
	if len(cgroups) == 0 {
		k.t.Error("the pod has no cgroup")
	}
	k.delete("graceful")
	eventually(k.t, "the container has ended in its own time", func() bool {
		log, err := os.ReadFile(filepath.Join(k.path("out"), "log"))
		check(k.t, err)
		return endedInItsOwnTime(string(log))
	})
	eventually(k.t, "the kubelet has forgotten the pod", func() bool { return k.pods()["graceful"] == nil })
	eventually(k.t, "the pod's cgroups and volumes are removed", func() bool {
		_, err := os.Stat(filepath.Join(k.path("root"), "pods", string(pod.UID)))
		return os.IsNotExist(err) && len(k.cgroups(string(pod.UID))) == 0
	})
}

// endedInItsOwnTime reports whether the log is that of a container that was ended
// step by step. The kubelet was restarted with the evented PLEG, which calls the cache
// of pods new before the first list has filled it (updateGlobalCache of the kubelet's
// pkg/kubelet/pleg/evented.go). A pod that is synced in that moment gets the sandbox
// that is there, and its container a second time. Then the log is that of both.
func endedInItsOwnTime(log string) bool {
	for containers := 1; containers <= 2; containers++ {
		want := "ready\n" + strings.Repeat("preStop\n", containers) + strings.Repeat("SIGTERM\n", containers) + strings.Repeat("done\n", containers)
		if len(log) == len(want) && slices.Equal(slices.Sorted(strings.Lines(log)), slices.Sorted(strings.Lines(want))) {
			return strings.Index(log, "preStop") < strings.Index(log, "SIGTERM") && strings.Index(log, "SIGTERM") < strings.Index(log, "done")
		}
	}
	return false
}

// checkEverythingGoes ends all pods, and waits until kubelet and runtime have
// nothing left of them.
func (k *kubelet) checkEverythingGoes() {
	for name := range k.pods() {
		k.delete(name)
	}
	eventually(k.t, "the runtime has no pod and no container", k.empty)
	eventually(k.t, "the kubelet has no pod's files, logs and cgroups", func() bool {
		return k.isEmpty(filepath.Join(k.path("root"), "pods")) && k.isEmpty(k.path("logs")) && len(k.cgroups("")) == 0
	})
}

func (k *kubelet) isEmpty(dir string) bool {
	k.t.Helper()
	entries, err := os.ReadDir(dir)
	check(k.t, err)
	return len(entries) == 0
}

// cgroups are those of the pods whose uid begins so.
func (k *kubelet) cgroups(uid string) (found []string) {
	k.t.Helper()
	for _, class := range []string{"*kubepods*", "*kubepods*/*"} { // the driver systemd repeats the names of those above
		for _, hierarchy := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
			dirs, err := filepath.Glob(filepath.Join(hierarchy, k.CgroupParent, class, "*pod"+strings.ReplaceAll(uid, "-", "_")+"*"))
			check(k.t, err)
			found = append(found, dirs...)
		}
	}
	return found
}
