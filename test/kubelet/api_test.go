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
)

// ask sends a request to the kubelet and returns its answer.
func (k *kubelet) ask(method, path string) (body string, err error) {
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(limited(k.t), method, "https://"+k.server+path, nil)
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

func (k *kubelet) healthy() bool {
	body, err := k.ask(http.MethodGet, "/healthz")
	return err == nil && body == "ok"
}

// get decodes the answer to a GET.
func (k *kubelet) get(path string, into any) {
	k.t.Helper()
	body, err := k.ask(http.MethodGet, path)
	check(k.t, err)
	check(k.t, json.Unmarshal([]byte(body), into))
}

// pods are those that the kubelet knows, by the names of their manifests.
func (k *kubelet) pods() map[string]*corev1.Pod {
	k.t.Helper()
	k.alive()
	var list corev1.PodList
	k.get("/pods", &list)
	pods := make(map[string]*corev1.Pod)
	for _, pod := range list.Items {
		pods[strings.TrimSuffix(pod.Name, "-"+nodeName)] = &pod
	}
	return pods
}

// container names a container in URLs of the kubelet.
func container(pod, name string) string {
	return fmt.Sprintf("default/%s-%s/%s", pod, nodeName, name)
}

// logs reads a container's log by the kubelet's API.
func (k *kubelet) logs(pod, name, query string) string {
	k.t.Helper()
	text, err := k.ask(http.MethodGet, "/containerLogs/"+container(pod, name)+"?"+query)
	check(k.t, err)
	return text
}

// run runs a command in a container by the kubelet's /run, which is ExecSync.
func (k *kubelet) run(pod, name, command string) string {
	k.t.Helper()
	query := url.Values{"cmd": {command}}
	text, err := k.ask(http.MethodPost, "/run/"+container(pod, name)+"?"+query.Encode())
	check(k.t, err)
	return text
}

// exec runs a script in a container by the kubelet's /exec, as kubectl does it.
func (k *kubelet) exec(executor newExecutor, pod, name, script, stdin string) (stdout, stderr string, err error) {
	k.t.Helper()
	query := url.Values{"command": {"sh", "-c", script}, "input": {"1"}, "output": {"1"}, "error": {"1"}}
	e, err := executor(&url.URL{Scheme: "https", Host: k.server, Path: "/exec/" + container(pod, name), RawQuery: query.Encode()})
	check(k.t, err)
	var out, errs bytes.Buffer
	err = e.StreamWithContext(limited(k.t), remotecommand.StreamOptions{Stdin: strings.NewReader(stdin), Stdout: &out, Stderr: &errs})
	return out.String(), errs.String(), err
}

type newExecutor func(*url.URL) (remotecommand.Executor, error)

// executors are kubectl's: WebSocket, and SPDY for older servers.
var executors = map[string]newExecutor{
	"WebSocket": func(u *url.URL) (remotecommand.Executor, error) {
		return remotecommand.NewWebSocketExecutor(clientConfig(), http.MethodGet, u.String())
	},
	"SPDY": func(u *url.URL) (remotecommand.Executor, error) {
		return remotecommand.NewSPDYExecutor(clientConfig(), http.MethodPost, u)
	},
}

func clientConfig() *rest.Config {
	return &rest.Config{TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
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
