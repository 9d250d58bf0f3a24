package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/minicri/minicri/test/harness"
)

// limit is for one wait. It is long, because a loaded machine is slow.
const limit = 4 * time.Minute

// space is a namespace of one test.
type space struct {
	t    testing.TB
	name string
}

// newSpace makes a namespace for the test, which runs beside others.
func newSpace(t *testing.T) *space {
	t.Parallel()
	return serialSpace(t)
}

// serialSpace makes a namespace for a test that runs alone.
func serialSpace(t *testing.T) *space {
	s := &space{t, strings.ToLower(strings.ReplaceAll(t.Name(), "_", "-"))}
	s.kubectl("create", "namespace", s.name)
	t.Cleanup(s.remove)
	s.eventually("the namespace has its service account", func() bool {
		_, err := s.try("get", "serviceaccount", "default")
		return err == nil
	})
	return s
}

func (s *space) eventually(what string, is func() bool) {
	harness.Eventually(s.t, what, func() bool {
		time.Sleep(200 * time.Millisecond) // kubectl is dear
		return is()
	})
}

func (s *space) remove() {
	if s.t.Failed() {
		for _, what := range []string{"pods", "events"} {
			out, _ := s.try("get", what, "-o", "wide")
			s.t.Logf("%s:\n%s", what, out)
		}
	}
	out, err := s.try("delete", "namespace", s.name, "--timeout=3m")
	harness.Want(s.t, err == nil, "delete the namespace: %v\n%s", err, out)
}

// command is kubectl in the namespace.
func (s *space) command(ctx context.Context, arguments ...string) *exec.Cmd {
	return kubectl(ctx, append([]string{"-n", s.name}, arguments...)...)
}

func (s *space) try(arguments ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	out, err := s.command(ctx, arguments...).CombinedOutput()
	return string(out), err
}

func (s *space) kubectl(arguments ...string) string {
	out, err := s.try(arguments...)
	harness.Need(s.t, err == nil, "kubectl %s: %v\n%s", strings.Join(arguments, " "), err, out)
	return out
}

// apply applies a manifest, in which IMAGE stands for the image of the tests.
func (s *space) apply(manifest string) {
	command := s.command(harness.Limited(s.t), "apply", "-f", "-")
	command.Stdin = strings.NewReader(strings.ReplaceAll(manifest, "IMAGE", image))
	out, err := command.CombinedOutput()
	harness.Need(s.t, err == nil, "apply: %v\n%s\n%s", err, out, manifest)
}

// run makes a pod of one container, named main, that runs a shell script. More is lines of
// its spec, and after "---" such of its container, in the flow style of YAML.
func (s *space) run(name, script, more string) {
	pod, container, _ := strings.Cut(more, "---\n")
	s.apply(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %[1]s, labels: {app: %[1]s}}
spec: {
  terminationGracePeriodSeconds: 0, %[2]s
  containers: [{name: main, image: "IMAGE", command: [sh, -c, %[3]q], %[4]s}]}
`, name, pod, script, container))
}

// sh runs a script in the main container of a pod.
func (s *space) sh(pod, script string) string {
	return s.kubectl("exec", pod, "--", "sh", "-c", script)
}

var apiClient = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", apiSocket)
}}}

var errNotFound = errors.New("not found")

// read reads an object of the API.
func read[T any](path string) (T, error) {
	var object T
	response, err := apiClient.Get("http://localhost" + path)
	if err != nil {
		return object, err
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return object, err
	case response.StatusCode == http.StatusNotFound:
		return object, errNotFound
	case response.StatusCode != http.StatusOK:
		return object, fmt.Errorf("GET %s: %s: %s", path, response.Status, data)
	}
	return object, json.Unmarshal(data, &object)
}

func (s *space) pod(name string) *corev1.Pod {
	s.t.Helper()
	pod, err := read[corev1.Pod]("/api/v1/namespaces/" + s.name + "/pods/" + name)
	harness.Need(s.t, err == nil || errors.Is(err, errNotFound), "%v", err)
	return &pod
}

// pods are those with a label app.
func (s *space) pods(app string) []corev1.Pod {
	list, err := read[corev1.PodList]("/api/v1/namespaces/" + s.name + "/pods?labelSelector=app%3D" + app)
	harness.Check(s.t, err)
	return list.Items
}

// await waits until a pod is as it should be, and returns it.
func (s *space) await(name, what string, is func(*corev1.Pod) bool) *corev1.Pod {
	var pod *corev1.Pod
	s.eventually("pod "+name+": "+what, func() bool {
		pod = s.pod(name)
		return is(pod)
	})
	return pod
}

func (s *space) ready(name string) *corev1.Pod { return s.await(name, "is ready", isReady) }

// ended waits until a pod has ended, with a code.
func (s *space) ended(name string, code int32) {
	s.t.Helper()
	pod := s.await(name, "has ended", func(pod *corev1.Pod) bool {
		return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
	})
	if end := status(pod).State.Terminated; end == nil || end.ExitCode != code || (pod.Status.Phase == corev1.PodSucceeded) != (code == 0) {
		s.t.Errorf("pod %s ended %s, want exit code %d: %v", name, pod.Status.Phase, code, end)
	}
}

func isReady(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

func same[T comparable](t testing.TB, what string, got, want T) {
	harness.Want(t, got == want, "%s: got %v, want %v", what, got, want)
}

func contains(t testing.TB, what, got, want string) {
	harness.Want(t, strings.Contains(got, want), "%s: got %q, want %q in it", what, got, want)
}

// status is that of the container, empty before there is one.
func status(pod *corev1.Pod) (s corev1.ContainerStatus) {
	if all := pod.Status.ContainerStatuses; len(all) > 0 {
		s = all[0]
	}
	return s
}
