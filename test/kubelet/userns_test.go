package kubelet

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// applyUserns makes a pod in a user namespace, whose root writes to a volume of
// the kubelet's.
func (k *kubelet) applyUserns() {
	host := false
	app := shell("app", "touch /files/mine; stat -c %u /files/mine /etc/hosts; cat /proc/self/uid_map"+forever, mounted("files"))
	app.VolumeMounts = append(app.VolumeMounts, corev1.VolumeMount{Name: "files", MountPath: "/part", SubPath: "sub/path"})
	spec := containers(app)
	spec.HostUsers = &host
	spec.Volumes = []corev1.Volume{emptyDir("files", corev1.StorageMediumDefault)}
	k.apply("userns", spec)
}

func (k *kubelet) checkUserns() {
	k.awaitReady("userns")
	var log []string
	eventually(k.t, "the container has told its ids", func() bool {
		log = strings.Fields(k.logs("userns", "app", ""))
		return len(log) == 5
	})
	same(k.t, "owners of its files", strings.Join(log[:2], " "), "0 0")
	if log[2] != "0" || log[3] == "0" || log[4] != "65536" {
		k.t.Errorf("its ids are mapped so: %v", log[2:])
	}
	k.run("userns", "app", "touch /part/file")
	same(k.t, "a part of the volume", k.run("userns", "app", "ls /files/sub/path"), "file\n")
}
