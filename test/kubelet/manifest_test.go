package kubelet

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// apply makes a static pod: it writes the manifest, by rename.
func (k *kubelet) apply(name string, spec corev1.PodSpec) {
	k.t.Helper()
	pod := corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec:       spec,
	}
	data, err := json.Marshal(pod)
	check(k.t, err)
	half := k.path(name + ".json")
	check(k.t, os.WriteFile(half, data, 0o600))
	check(k.t, os.Rename(half, k.manifest(name)))
}

func (k *kubelet) manifest(name string) string {
	return filepath.Join(k.path("manifests"), name+".json")
}

// delete takes a manifest away: the kubelet then ends the pod.
func (k *kubelet) delete(name string) {
	k.t.Helper()
	check(k.t, os.Remove(k.manifest(name)))
}

type option func(*corev1.Container)

// shell is a container that runs a script.
func shell(name, script string, options ...option) corev1.Container {
	c := corev1.Container{
		Name: name, Image: imageName, ImagePullPolicy: corev1.PullNever,
		Command: []string{"/bin/sh", "-c", script},
	}
	for _, o := range options {
		o(&c)
	}
	return c
}

// forever is the end of a script whose container ends at SIGTERM.
const forever = "; trap 'exit 0' TERM; while true; do sleep 0.1; done"

func containers(list ...corev1.Container) corev1.PodSpec {
	grace := int64(2)
	return corev1.PodSpec{Containers: list, TerminationGracePeriodSeconds: &grace}
}

// mounted mounts a volume at the path of its name.
func mounted(volume string) option {
	return func(c *corev1.Container) {
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: volume, MountPath: "/" + volume})
	}
}

func emptyDir(name string, medium corev1.StorageMedium) corev1.Volume {
	source := corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: medium}}
	return corev1.Volume{Name: name, VolumeSource: source}
}

func limit(cpu, memory string) option {
	return func(c *corev1.Container) {
		c.Resources.Limits = corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory),
		}
	}
}

func readiness(action corev1.ProbeHandler) option {
	return func(c *corev1.Container) { c.ReadinessProbe = probe(action) }
}

// probe asks every second. Time-outs are for busy machines.
func probe(action corev1.ProbeHandler) *corev1.Probe {
	return &corev1.Probe{ProbeHandler: action, PeriodSeconds: 1, TimeoutSeconds: 20, FailureThreshold: 1}
}

func command(words ...string) corev1.ProbeHandler {
	return corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: words}}
}

func httpGet(path string, port int) corev1.ProbeHandler {
	return corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: path, Port: intstr.FromInt(port)}}
}

// isReady reports whether the kubelet says that a pod is ready.
func isReady(pod *corev1.Pod) bool {
	return pod != nil && slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// status is that of a container, also of an init container.
func status(pod *corev1.Pod, name string) corev1.ContainerStatus {
	if pod != nil {
		for _, s := range slices.Concat(pod.Status.ContainerStatuses, pod.Status.InitContainerStatuses) {
			if s.Name == name {
				return s
			}
		}
	}
	return corev1.ContainerStatus{}
}
