package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/leak"
)

// demonstration is one run of the demo.
type demonstration struct {
	table  *table
	node   *demoNode
	before leak.Snapshot
	first  *runtimeapi.PodSandboxStatus
	second *runtimeapi.PodSandboxStatus
	// server is the container that answers in the first pod.
	server string
}

func newDemonstration(output io.Writer) (*demonstration, error) {
	node, err := newDemoNode()
	if err != nil {
		return nil, err
	}
	return &demonstration{table: newTable(output), node: node}, nil
}

func (d *demonstration) close() {
	if err := d.node.remove(); err != nil {
		fmt.Fprintln(os.Stderr, "demo: clean up:", err)
	}
}

// run runs the steps; the first one that fails ends the demo.
func (d *demonstration) run(ctx context.Context) error {
	var err error
	if d.before, err = leak.Take(ctx, d.node.scope()); err != nil {
		return err
	}
	version, err := exec.CommandContext(ctx, d.node.minicri(), "version").Output()
	if err != nil {
		return fmt.Errorf("minicri version: %w", err)
	}
	d.table.title(strings.TrimSpace(string(version)) + ": a pod's life on this machine")
	steps := []struct {
		name string
		do   func(context.Context) (result string, err error)
	}{
		{"start the daemon", d.startDaemon},
		{"ask for its status", d.status},
		{"run pod nginx", d.runFirst},
		{"ask for the pod's status", d.podStatus},
		{"ping the pod", d.ping},
		{"build and import an image", d.importImage},
		{"run container server in nginx", d.runServer},
		{"run container asker in nginx", d.askOverLocalhost},
		{"have the server crash", d.crashServer},
		{"create it again", d.runServer},
		{"ask it by exec", d.askByExec},
		{"run pod client", d.runSecond},
		{"ping nginx from inside client", d.pingBetween},
		{"kill the daemon with SIGKILL", d.kill},
		{"start it again", d.startDaemon},
		{"find the pods as they were", d.compare},
		{"ping nginx from inside client again", d.pingBetween},
		{"ask the server by exec again", d.askByExec},
		{"stop both pods", d.stopAll},
		{"remove both pods", d.removeAll},
		{"stop the daemon with SIGTERM", d.terminate},
	}
	for _, step := range steps {
		began := time.Now()
		result, err := step.do(ctx)
		d.table.row(step.name, time.Since(began), result, err)
		if err != nil {
			return fmt.Errorf("%s: %w\n%s", step.name, err, d.node.lastLog())
		}
	}
	return d.countLeft(ctx)
}

func (d *demonstration) startDaemon(ctx context.Context) (string, error) {
	if err := d.node.start(ctx); err != nil {
		return "", err
	}
	return fmt.Sprintf("pid %d serves %s", d.node.daemon.Process.Pid, filepath.Base(d.node.socket())), nil
}

func (d *demonstration) status(ctx context.Context) (string, error) {
	version, err := d.node.client.Version(ctx, &runtimeapi.VersionRequest{})
	if err != nil {
		return "", err
	}
	conditions, err := d.awaitConditions(ctx)
	if err != nil {
		return "", err
	}
	return strings.Join(append([]string{version.GetRuntimeName() + " " + version.GetRuntimeVersion()}, conditions...), ", "), nil
}

// statusPatience is for a busy machine: a plugin that does not answer in time leaves
// the network unready until the next check.
const statusPatience = time.Minute

// awaitConditions returns the conditions of the node when all of them hold.
func (d *demonstration) awaitConditions(ctx context.Context) ([]string, error) {
	for deadline := time.Now().Add(statusPatience); ; time.Sleep(100 * time.Millisecond) {
		response, err := d.node.client.Status(ctx, &runtimeapi.StatusRequest{})
		if err != nil {
			return nil, err
		}
		var holds []string
		for _, condition := range response.GetStatus().GetConditions() {
			if condition.GetStatus() {
				holds = append(holds, condition.GetType())
			} else {
				err = errors.Join(err, fmt.Errorf("%s is false: %s", condition.GetType(), condition.GetMessage()))
			}
		}
		if err == nil || time.Now().After(deadline) {
			return holds, err
		}
	}
}

func (d *demonstration) runFirst(ctx context.Context) (result string, err error) {
	d.first, err = d.node.runPod(ctx, "nginx")
	return d.describe(d.first), err
}

func (d *demonstration) runSecond(ctx context.Context) (result string, err error) {
	d.second, err = d.node.runPod(ctx, "client")
	return d.describe(d.second), err
}

func (d *demonstration) describe(pod *runtimeapi.PodSandboxStatus) string {
	return fmt.Sprintf("%.12s at %s", pod.GetId(), pod.GetNetwork().GetIp())
}

func (d *demonstration) podStatus(ctx context.Context) (string, error) {
	status, err := d.node.podStatus(ctx, d.first.GetId())
	if err != nil {
		return "", err
	}
	if status.GetState() != runtimeapi.PodSandboxState_SANDBOX_READY {
		return "", fmt.Errorf("pod %s is %v", status.GetId(), status.GetState())
	}
	timeline, err := d.node.timeline(ctx, d.first.GetId())
	return "ready; " + timeline, err
}

func (d *demonstration) ping(ctx context.Context) (string, error) {
	return pingFrom(ctx, "", d.first.GetNetwork().GetIp())
}

func (d *demonstration) pingBetween(ctx context.Context) (string, error) {
	return pingFrom(ctx, d.node.netns(d.second.GetId()), d.first.GetNetwork().GetIp())
}

// pingFrom pings an address, from inside a network namespace if one is given.
func pingFrom(ctx context.Context, netns, address string) (string, error) {
	arguments := []string{"ping", "-c", "1", "-W", "5", address}
	if netns != "" {
		arguments = append([]string{"nsenter", "--net=" + netns, "--"}, arguments...)
	}
	out, err := exec.CommandContext(ctx, arguments[0], arguments[1:]...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(arguments, " "), err, out)
	}
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "time=") {
			return strings.TrimSpace(line), nil
		}
	}
	return strings.TrimSpace(string(out)), nil
}

func (d *demonstration) kill(context.Context) (string, error) {
	if err := d.node.daemon.Process.Kill(); err != nil {
		return "", err
	}
	_ = d.node.daemon.Wait() // "signal: killed"
	return "pods keep running", nil
}

// compare fails if a pod's status differs in anything from before the kill.
func (d *demonstration) compare(ctx context.Context) (string, error) {
	list, err := d.node.client.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return "", err
	}
	if len(list.GetItems()) != 2 {
		return "", fmt.Errorf("%d pods are listed, not 2", len(list.GetItems()))
	}
	for _, before := range []*runtimeapi.PodSandboxStatus{d.first, d.second} {
		after, err := d.node.podStatus(ctx, before.GetId())
		if err != nil {
			return "", err
		}
		if before.String() != after.String() {
			return "", fmt.Errorf("pod %s was %v, is %v", before.GetId(), before, after)
		}
	}
	return "same ids, addresses and times of creation, ready", nil
}

func (d *demonstration) stopAll(ctx context.Context) (string, error) {
	for _, pod := range []*runtimeapi.PodSandboxStatus{d.first, d.second} {
		if _, err := d.node.client.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: pod.GetId()}); err != nil {
			return "", err
		}
	}
	return "pause gone, CNI DEL done, namespaces removed", nil
}

func (d *demonstration) removeAll(ctx context.Context) (string, error) {
	for _, pod := range []*runtimeapi.PodSandboxStatus{d.first, d.second} {
		if _, err := d.node.client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: pod.GetId()}); err != nil {
			return "", err
		}
	}
	list, err := d.node.client.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	return fmt.Sprintf("%d pods listed", len(list.GetItems())), err
}

func (d *demonstration) terminate(context.Context) (string, error) {
	if err := d.node.stop(); err != nil {
		return "", err
	}
	return "exit code 0", nil
}

// countLeft counts the kernel objects and files that exist now and did not
// before. The bridge belongs to the network and not to a pod; it is removed first.
func (d *demonstration) countLeft(ctx context.Context) error {
	if err := d.node.removeNetwork(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	leaks, err := leak.Settle(ctx, d.before, d.node.scope())
	if err != nil {
		return err
	}
	d.table.title("left behind")
	tally := leak.Tally(leaks)
	for _, kind := range leak.Kinds() {
		if slices.Contains(d.node.leakKinds(), kind) {
			d.table.count(string(kind), tally[kind])
		}
	}
	if len(leaks) == 0 {
		return nil
	}
	var errs []error
	for _, l := range leaks {
		errs = append(errs, errors.New(l.String()))
	}
	return fmt.Errorf("the demo left something behind: %w", errors.Join(errs...))
}
