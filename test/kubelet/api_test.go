package kubelet

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"

	"github.com/minicri/minicri/test/harness"
)

// ask sends a request to the kubelet and returns its answer.
func (k *kubelet) ask(method, path string) (body string, err error) {
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(k.limited(), method, "https://"+k.server+path, nil)
	if err != nil {
		return "", err
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s: %s", method, path, response.Status, data)
	}
	return string(data), err
}

// pods are those that the kubelet knows, by the names of their manifests.
func (k *kubelet) pods() map[string]*corev1.Pod {
	k.alive()
	body, err := k.ask(http.MethodGet, "/pods")
	harness.Check(k.t, err)
	var list corev1.PodList
	harness.Check(k.t, json.Unmarshal([]byte(body), &list))
	pods := make(map[string]*corev1.Pod)
	for _, pod := range list.Items {
		pods[strings.TrimSuffix(pod.Name, "-"+nodeName)] = &pod
	}
	return pods
}

// container names a container in URLs of the kubelet.
func container(pod, name string) string { return fmt.Sprintf("default/%s-%s/%s", pod, nodeName, name) }

// logs reads a container's log by the kubelet's API.
func (k *kubelet) logs(pod, name, query string) string {
	text, err := k.ask(http.MethodGet, "/containerLogs/"+container(pod, name)+"?"+query)
	harness.Check(k.t, err)
	return text
}

// run runs a command in a container by the kubelet's /run, which is ExecSync.
func (k *kubelet) run(pod, name, command string) string {
	text, err := k.ask(http.MethodPost, "/run/"+container(pod, name)+"?"+url.Values{"cmd": {command}}.Encode())
	harness.Check(k.t, err)
	return text
}

// checkExec runs a script in a container by the kubelet's /exec, as kubectl does it: by
// WebSocket, and SPDY for older servers; and by ExecSync.
func (k *kubelet) checkExec() {
	config := &rest.Config{TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	query := url.Values{"command": {"sh", "-c", "cat; echo oops >&2; exit 5"}, "input": {"1"}, "output": {"1"}, "error": {"1"}}
	server := &url.URL{Scheme: "https", Host: k.server, Path: "/exec/" + container("pair", "server"), RawQuery: query.Encode()}
	socket, err := remotecommand.NewWebSocketExecutor(config, http.MethodGet, server.String())
	harness.Check(k.t, err)
	spdy, err := remotecommand.NewSPDYExecutor(config, http.MethodPost, server)
	harness.Check(k.t, err)
	for name, executor := range map[string]remotecommand.Executor{"WebSocket": socket, "SPDY": spdy} {
		var out, errs bytes.Buffer
		streams := remotecommand.StreamOptions{Stdin: strings.NewReader("some input"), Stdout: &out, Stderr: &errs}
		err := executor.StreamWithContext(k.limited(), streams)
		harness.Want(k.t, out.String() == "some input" && errs.String() == "oops\n" && err != nil && strings.Contains(err.Error(), "exit code 5"),
			"%s: got %q, %q and %v", name, &out, &errs, err)
	}
	harness.Same(k.t, "by ExecSync", k.run("pair", "server", "cat /www/page"), "from the sidecar\n")
}
