package kubelet

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// applyCrash makes a pod with a container that crashes twice and then stays,
// one that uses too much memory once, and one that just stays.
func (k *kubelet) applyCrash() {
	// A kubelet writes /etc/hosts anew, and not at once, as it starts each container of a pod.
	const script = `n=$(cat /state/n || echo 0); echo $((n + 1)) >/state/n; echo "run $n at $(until hostname -i 2>/dev/null; do sleep 0.1; done)"
		test $n -ge 2 || { echo "end of run $n" >/dev/termination-log; exit 3; }`
	spec := containers(
		shell("app", script+forever, mounted("state")),
		shell("greedy", "test -e /state/greedy || { touch /state/greedy; exec tail /dev/zero; }"+forever, mounted("state"), limit("1", "32Mi")),
		shell("neighbour", "true"+forever),
	)
	spec.Volumes = []corev1.Volume{emptyDir("state", corev1.StorageMediumDefault)}
	k.apply("crash", spec)
}

func (k *kubelet) checkCrash() {
	var pod *corev1.Pod
	eventually(k.t, "all run again", func() bool {
		pod = k.pods()["crash"]
		return restarts(pod, "app") == 2 && restarts(pod, "greedy") == 1 && isReady(pod)
	})
	last := status(pod, "app").LastTerminationState.Terminated
	if last == nil || last.ExitCode != 3 || last.Reason != "Error" || last.Message != "end of run 1\n" {
		k.t.Errorf("the end of the last run: %v", last)
	}
	last = status(pod, "greedy").LastTerminationState.Terminated
	if last == nil || last.ExitCode != 137 || last.Reason != "OOMKilled" {
		k.t.Errorf("the end of one with too much memory: %v", last)
	}
	if restarts(pod, "neighbour") != 0 {
		k.t.Error("the container beside it was restarted")
	}
	if list := k.sandboxes("crash"); len(list) != 1 || list[0].Metadata.Attempt != 0 {
		k.t.Errorf("want the first sandbox alone, got %v", list)
	}
	eventually(k.t, "it says that it runs, at the pod's address", func() bool {
		return k.logs("crash", "app", "") == "run 2 at "+pod.Status.PodIP+"\n"
	})
	same(k.t, "log of the run before", k.logs("crash", "app", "previous=true"), "run 1 at "+pod.Status.PodIP+"\n")
}

func (k *kubelet) checkExec() {
	for name, executor := range executors {
		stdout, stderr, err := k.exec(executor, "pair", "server", "cat; echo oops >&2; exit 5", "some input")
		if stdout != "some input" || stderr != "oops\n" || err == nil || !strings.Contains(err.Error(), "exit code 5") {
			k.t.Errorf("%s: got %q, %q and %v", name, stdout, stderr, err)
		}
	}
	same(k.t, "by ExecSync", k.run("pair", "server", "cat /www/page"), "from the sidecar\n")
}
