package cluster

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestVolumes(t *testing.T) {
	s := newSpace(t)
	s.apply(strings.ReplaceAll(`
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {colour: green, shape: round}
---
apiVersion: v1
kind: Secret
metadata: {name: secret}
stringData: {password: sesame}
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: SPACE}
spec:
  capacity: {storage: 1Mi}
  accessModes: [ReadWriteOnce]
  storageClassName: SPACE
  hostPath: {path: /tmp/SPACE-pv, type: DirectoryOrCreate}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: claim}
spec: {accessModes: [ReadWriteOnce], storageClassName: SPACE, resources: {requests: {storage: 1Mi}}}
`, "SPACE", s.name))
	t.Cleanup(func() { s.try("delete", "pv", s.name, "--wait=false") })
	s.run("pod", "sleep 1000", strings.ReplaceAll(`
nodeName: node2
securityContext: {fsGroup: 2000}
volumes:
- {name: empty, emptyDir: {}}
- {name: memory, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
- {name: settings, configMap: {name: settings}}
- {name: secret, secret: {secretName: secret, defaultMode: 256}}
- name: down
  downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}
- name: projected
  projected:
    sources:
    - configMap: {name: settings, items: [{key: colour, path: colour}]}
    - secret: {name: secret}
    - serviceAccountToken: {path: token}
- {name: host, hostPath: {path: /tmp/SPACE, type: DirectoryOrCreate}}
- {name: claim, persistentVolumeClaim: {claimName: claim}}
- {name: image, image: {reference: IMAGE}}
---
volumeMounts:
- {name: empty, mountPath: /empty}
- {name: memory, mountPath: /memory}
- {name: settings, mountPath: /settings}
- {name: settings, mountPath: /shape, subPath: shape}
- {name: secret, mountPath: /secret}
- {name: down, mountPath: /down}
- {name: projected, mountPath: /projected}
- {name: host, mountPath: /host}
- {name: claim, mountPath: /claim}
- {name: image, mountPath: /image, readOnly: true}
- {name: empty, mountPath: /again, subPath: part/of}
- {name: empty, mountPath: /look, readOnly: true, recursiveReadOnly: Enabled}
`, "SPACE", s.name))
	s.ready("pod")
	for script, want := range map[string]string{
		"cat /settings/colour /shape":                             "greenround",
		"cat /secret/password && stat -Lc %a:%g /secret/password": "sesame440:2000\n",
		"cat /down/name": "pod",
		"cat /projected/colour /projected/password && wc -l </projected/token":     "greensesame0\n",
		"echo to >/empty/f && cat /look/f && touch /look/g 2>/dev/null || echo no": "to\nno\n",
		"echo sub >/again/f && cat /empty/part/of/f":                               "sub\n",
		"df -k /memory | tail -1 | awk '{print $2}'":                               "1024\n",
		"stat -c %g /empty": "2000\n",
		"ls /image/bin/busybox && touch /image/x 2>/dev/null || echo no": "/image/bin/busybox\nno\n",
		"echo claimed >/claim/f; echo hosted >/host/f":                   "",
	} {
		same(t, script, s.sh("pod", script), want)
	}
	same(t, "files on the node", onNode(t, node2, "cat /tmp/"+s.name+"-pv/f /tmp/"+s.name+"/f"), "claimed\nhosted\n")
	s.kubectl("patch", "configmap", "settings", "-p", `{"data":{"colour":"blue"}}`)
	eventually(t, "a changed ConfigMap arrives in the running container", func() bool { return s.sh("pod", "cat /settings/colour") == "blue" })
}

func TestNamespacesOfTheNode(t *testing.T) {
	s := newSpace(t)
	s.run("host", "exec agnhost netexec --http-port=18080", "nodeName: node2\nhostNetwork: true\nhostPID: true\nhostIPC: true\n---\nsecurityContext: {privileged: true}\n")
	s.run("port", "exec agnhost netexec --http-port=8080", "nodeName: node2\n---\nports: [{containerPort: 8080, hostPort: 18081}]\n")
	pod := s.ready("host")
	same(t, "address", pod.Status.PodIP, "172.30.0.12")
	same(t, "hostname", s.sh("host", "hostname"), node2+"\n")
	contains(t, "processes", s.sh("host", "cat /proc/[0-9]*/comm"), "kubelet\n")
	s.ready("port")
	contains(t, "hostPort from the other node", onNode(t, node1, "busybox wget -qO- http://172.30.0.12:18081/hostname"), "port")
	contains(t, "hostPort from the node", onNode(t, node2, "busybox wget -qO- http://172.30.0.12:18081/hostname"), "port")
	s.kubectl("delete", "pod", "port")
	eventually(t, "the hostPort answers no more", func() bool {
		_, err := onNodeTry(t, node1, "busybox wget -qO- http://172.30.0.12:18081/hostname")
		return err != nil
	})
}

func TestSharedProcessNamespace(t *testing.T) {
	s := newSpace(t)
	s.run("shared", "exec sleep 1111", `
shareProcessNamespace: true
initContainers: [{name: side, image: IMAGE, restartPolicy: Always, command: [sleep, "2222"]}]
`)
	s.ready("shared")
	out := s.sh("shared", "ps")
	for _, process := range []string{"sleep 1111", "sleep 2222"} {
		contains(t, "ps", out, process)
	}
}

func TestUserNamespace(t *testing.T) {
	s := newSpace(t)
	s.run("user", "sleep 1000", "hostUsers: false\nvolumes: [{name: v, emptyDir: {}}]\n---\nvolumeMounts: [{name: v, mountPath: /v}]\n")
	pod := s.ready("user")
	mapped := strings.Fields(s.sh("user", "cat /proc/self/uid_map"))
	if len(mapped) != 3 || mapped[0] != "0" || mapped[1] == "0" || mapped[2] != "65536" {
		t.Errorf("uid_map: %v", mapped)
	}
	same(t, "owner of what it wrote in a volume", s.sh("user", "touch /v/f && stat -c %u /v/f"), "0\n")
	same(t, "the same, seen from the node", onNode(t, pod.Spec.NodeName, "stat -c %u /var/lib/kubelet/pods/"+string(pod.UID)+"/volumes/kubernetes.io~empty-dir/v/f"), "0\n")
	contains(t, "its root filesystem is its own", s.sh("user", "touch /new && stat -c %u /new"), "0")
}

func TestRuntimeClass(t *testing.T) {
	s := newSpace(t)
	s.apply(strings.ReplaceAll(`
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: SPACE-runc}
handler: runc
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: SPACE-none}
handler: nosuch
`, "SPACE", s.name))
	t.Cleanup(func() { s.try("delete", "runtimeclass", s.name+"-runc", s.name+"-none") })
	s.run("good", "sleep 1000", "runtimeClassName: "+s.name+"-runc\n")
	s.run("bad", "sleep 1000", "runtimeClassName: "+s.name+"-none\n")
	s.ready("good")
	eventually(t, "an event says which handler is missing", func() bool {
		events, err := read[corev1.EventList]("/api/v1/namespaces/" + s.name + "/events")
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events.Items {
			if e.InvolvedObject.Name == "bad" && strings.Contains(e.Message, "nosuch") {
				return true
			}
		}
		return false
	})
}
