package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// api reaches a cluster's API server by kubectl proxy.
type api struct {
	client http.Client
	proxy  *exec.Cmd
	dir    string
}

func clusterDir(name string) string { return filepath.Join("/var/lib/minicri-cluster", name) }

func newAPI(ctx context.Context, name string) (*api, error) {
	dir, err := os.MkdirTemp("", "mcb")
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(dir, "api.sock")
	a := &api{dir: dir}
	a.proxy = exec.CommandContext(ctx, filepath.Join(clusterDir(name), "nodes/node1/bin/kubectl"),
		"--kubeconfig", filepath.Join(clusterDir(name), "kubeconfig"), "proxy", "--unix-socket", socket)
	if err := a.proxy.Start(); err != nil {
		return nil, err
	}
	a.client.Transport = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}
	for range 100 {
		if _, err = a.get(ctx, "/api/v1/namespaces/default/serviceaccounts/default"); err == nil {
			return a, a.post(ctx, "/api/v1/namespaces", object{"apiVersion": "v1", "kind": "Namespace", "metadata": object{"name": namespace}})
		}
		time.Sleep(100 * time.Millisecond)
	}
	a.close()
	return nil, err
}

func (a *api) close() {
	a.proxy.Process.Kill() // it has nothing to save
	a.proxy.Wait()
	os.RemoveAll(a.dir)
}

func (a *api) do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	data, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, method, "http://localhost"+path, bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := a.client.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode >= http.StatusBadRequest {
		defer response.Body.Close()
		said, _ := io.ReadAll(response.Body) // the status says enough without
		return nil, fmt.Errorf("%s %s: %s: %s", method, path, response.Status, said)
	}
	return response, nil
}

func (a *api) get(ctx context.Context, path string) ([]byte, error) {
	response, err := a.do(ctx, http.MethodGet, path, nil)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	return io.ReadAll(response.Body)
}

// post makes an object. A namespace that has just been made has no service
// account for some moments, and no pod without.
func (a *api) post(ctx context.Context, path string, body object) error {
	var err error
	for range 50 {
		var response *http.Response
		if response, err = a.do(ctx, http.MethodPost, path, body); err == nil {
			return response.Body.Close()
		}
		time.Sleep(100 * time.Millisecond)
	}
	return err
}

// podObject is what is used of a pod.
type podObject struct {
	Metadata struct{ Name string }
	Status   struct {
		Conditions []struct{ Type, Status string }
	}
}

func (p podObject) ready() bool {
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" {
			return c.Status == "True"
		}
	}
	return false
}

type watch struct {
	body    io.ReadCloser
	decoder *json.Decoder
}

func (a *api) watchPods(ctx context.Context) (*watch, error) {
	response, err := a.do(ctx, http.MethodGet, "/api/v1/namespaces/"+namespace+"/pods?watch=1", nil)
	if err != nil {
		return nil, err
	}
	return &watch{response.Body, json.NewDecoder(response.Body)}, nil
}

func (w *watch) close() { w.body.Close() }

func (w *watch) next() (podObject, error) {
	var event struct{ Object podObject }
	err := w.decoder.Decode(&event)
	return event.Object, err
}

// deletePods deletes all pods and waits until they are gone.
func (a *api) deletePods(ctx context.Context) error {
	const path = "/api/v1/namespaces/" + namespace + "/pods"
	response, err := a.do(ctx, http.MethodDelete, path, nil)
	if err != nil {
		return err
	}
	response.Body.Close()
	for range 1200 {
		data, err := a.get(ctx, path)
		if err != nil {
			return err
		}
		var list struct{ Items []any }
		if err := json.Unmarshal(data, &list); err != nil || len(list.Items) == 0 {
			return err
		}
		time.Sleep(250 * time.Millisecond)
	}
	return fmt.Errorf("pods are left 5 minutes after they were deleted")
}

func (a *api) awaitJob(ctx context.Context, name string) error {
	for range 2400 {
		data, err := a.get(ctx, "/apis/batch/v1/namespaces/"+namespace+"/jobs/"+name)
		if err != nil {
			return err
		}
		var job struct{ Status struct{ Succeeded int } }
		if err := json.Unmarshal(data, &job); err != nil {
			return err
		}
		if job.Status.Succeeded == jobPods {
			return nil
		}
		time.Sleep(250 * time.Millisecond)
	}
	return fmt.Errorf("the Job has not ended after 10 minutes")
}
