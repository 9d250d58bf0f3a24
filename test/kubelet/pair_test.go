package kubelet

import (
	"fmt"
	"io"
	"net/http"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// bigFile is the size of a file that the pair's server serves.
const bigFile = 4 << 20

// applyPair makes a pod whose sidecar serves an init container, whose result a
// server serves to a client. The server's files are in a volume that the
// kubelet mounts, the client is as restricted as clusters want it, and all
// share the pod's process namespace.
func (k *kubelet) applyPair() {
	always := corev1.ContainerRestartPolicyAlways
	sidecar := shell("sidecar", "mkdir /files && echo from the sidecar >/files/page && httpd -p 127.0.0.1:9000 -h /files"+forever)
	sidecar.RestartPolicy = &always
	const fetch = "until wget -qO /www/page http://127.0.0.1:9000/page; do sleep 0.1; done; dd if=/dev/zero of=/www/big bs=1M count=4"
	spec := containers(
		shell("server", "httpd -p 8080 -h /www"+forever, mounted("www"), readiness(httpGet("/page", 8080))),
		shell("client", "until wget -qO- http://127.0.0.1:8080/page 2>/dev/null; do sleep 0.1; done; echo said so"+forever, restricted),
	)
	share := true
	spec.ShareProcessNamespace = &share
	spec.InitContainers = []corev1.Container{sidecar, shell("prepare", fetch, mounted("www"))}
	spec.Volumes = []corev1.Volume{emptyDir("www", corev1.StorageMediumMemory)}
	k.apply("pair", spec)
}

func (k *kubelet) checkPair() {
	pod := k.awaitReady("pair")
	end := status(pod, "prepare").State.Terminated
	if end == nil || end.ExitCode != 0 || end.Reason != "Completed" {
		k.t.Errorf("the init container: %v", status(pod, "prepare"))
	}
	prepare := k.inRuntime("pair", "prepare")
	if sidecar := k.inRuntime("pair", "sidecar"); sidecar.StartedAt > prepare.StartedAt {
		k.t.Error("the init container started before the sidecar")
	}
	if server := k.inRuntime("pair", "server"); server.CreatedAt < prepare.FinishedAt {
		k.t.Error("the server was created before the init container had ended")
	}
	eventually(k.t, "the client has the page by localhost, and logs it", func() bool {
		return k.logs("pair", "client", "") == "from the sidecar\nsaid so\n"
	})
	same(k.t, "last line", k.logs("pair", "client", "tailLines=1"), "said so\n")
	same(k.t, "mount", k.run("pair", "server", "grep -c ./www.tmpfs /proc/mounts"), "1\n")
	same(k.t, "first process", k.run("pair", "server", "cat /proc/1/comm"), "pause\n")
	same(k.t, "capabilities and seccomp of the restricted one",
		k.run("pair", "client", "grep -E (CapEff|Seccomp|NoNewPrivs): /proc/self/status"), "CapEff:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n")
	same(k.t, "user", k.run("pair", "client", "id -u"), "1000\n")
	same(k.t, "hostname", k.run("pair", "client", "cat /etc/hostname"), "pair-node\n")
	same(k.t, "resolv.conf", k.run("pair", "client", "cat /etc/resolv.conf"), "nameserver 192.0.2.53\n")
	same(k.t, "own line of hosts", k.run("pair", "client", "grep pair /etc/hosts"), pod.Status.PodIP+"\tpair-node\n")
	if got := len(fetch(k.t, k.Relay(pod.Status.PodIP+":8080"), "/big")); got != bigFile {
		k.t.Errorf("the node reads %d bytes from the pod", got)
	}
}

// restricted is what the pod security standard of that name asks for, and more.
func restricted(c *corev1.Container) {
	yes, no, user := true, false, int64(1000)
	c.SecurityContext = &corev1.SecurityContext{
		RunAsUser: &user, RunAsNonRoot: &yes, ReadOnlyRootFilesystem: &yes, AllowPrivilegeEscalation: &no,
		Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
}

// applyHost makes a privileged pod in the node's network and process namespace.
func (k *kubelet) applyHost() {
	spec := containers(shell("server", "mkdir /www && echo on the node >/www/page && httpd -p 8081 -h /www"+forever, readiness(httpGet("/page", 8081))))
	spec.HostNetwork, spec.HostPID = true, true
	privileged := true
	spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: &privileged}
	k.apply("host", spec)
}

func (k *kubelet) checkHost() {
	k.awaitReady("host")
	same(k.t, "page", fetch(k.t, k.Relay(nodeAddress+":8081"), "/page"), "on the node\n")
	k.run("host", "server", fmt.Sprintf("ls /proc/%d", k.process.Process.Pid))
}

func fetch(t testing.TB, server, path string) string {
	t.Helper()
	request, err := http.NewRequestWithContext(limited(t), http.MethodGet, "http://"+server+path, nil)
	check(t, err)
	request.Close = true
	response, err := http.DefaultClient.Do(request)
	check(t, err)
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	check(t, err)
	return string(data)
}
