package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// demoServer is where the container server listens: on the pod's loopback, so
// only containers of the same pod can ask it.
const demoServer = "127.0.0.1:8080"

func (d *demonstration) importImage(ctx context.Context) (string, error) {
	if err := d.node.importImage(ctx); err != nil {
		return "", err
	}
	return demoImage + ", of one file, without a registry", nil
}

// runServer runs the server; after a crash it creates the next attempt, as a kubelet does.
func (d *demonstration) runServer(ctx context.Context) (result string, err error) {
	attempt := uint32(0)
	if d.server != "" {
		attempt = 1
	}
	if d.server, err = d.node.runContainer(ctx, d.first.GetId(), "server", attempt, serveRole, demoServer); err != nil {
		return "", err
	}
	status, err := d.node.podStatus(ctx, d.first.GetId())
	if err != nil {
		return "", err
	}
	if address, before := status.GetNetwork().GetIp(), d.first.GetNetwork().GetIp(); address != before {
		return "", fmt.Errorf("the pod's address was %s, is %s", before, address)
	}
	return fmt.Sprintf("%.12s, attempt %d; the pod is at %s", d.server, attempt, status.GetNetwork().GetIp()), nil
}

// askOverLocalhost has another container of the pod ask the server, and reads
// the answer in its log.
func (d *demonstration) askOverLocalhost(ctx context.Context) (string, error) {
	id, err := d.node.runContainer(ctx, d.first.GetId(), "asker", 0, askRole, "http://"+demoServer)
	if err != nil {
		return "", err
	}
	status, err := d.node.awaitExit(ctx, id)
	if err != nil {
		return "", err
	}
	log, err := os.ReadFile(status.GetLogPath())
	if err != nil {
		return "", err
	}
	if status.GetExitCode() != 0 {
		return "", fmt.Errorf("exit code %d: %s", status.GetExitCode(), log)
	}
	_, line, _ := strings.Cut(string(log), " F ")
	return fmt.Sprintf("over localhost: %q", strings.TrimSpace(line)), nil
}

func (d *demonstration) crashServer(ctx context.Context) (string, error) {
	// The server exits before it answers: this exec fails.
	_, _ = d.node.exec(ctx, d.server, demoBinary, askRole, "http://"+demoServer+"/crash")
	status, err := d.node.awaitExit(ctx, d.server)
	if err != nil {
		return "", err
	}
	if status.GetExitCode() != crashCode {
		return "", fmt.Errorf("the server's exit code is %d, not %d", status.GetExitCode(), crashCode)
	}
	return fmt.Sprintf("exit code %d, %s", status.GetExitCode(), status.GetReason()), nil
}

func (d *demonstration) askByExec(ctx context.Context) (string, error) {
	answer, err := d.node.exec(ctx, d.server, demoBinary, askRole, "http://"+demoServer)
	return fmt.Sprintf("%q", strings.TrimSpace(answer)), err
}

// runContainer creates a container of the demo's image and starts it.
func (n *demoNode) runContainer(ctx context.Context, podID, name string, attempt uint32, arguments ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	created, err := n.client.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: podID, Config: &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name, Attempt: attempt},
		Image:    &runtimeapi.ImageSpec{Image: demoImage},
		Args:     arguments,
		LogPath:  fmt.Sprintf("%s.%d.log", name, attempt),
	}})
	if err != nil {
		return "", err
	}
	_, err = n.client.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: created.GetContainerId()})
	return created.GetContainerId(), err
}

func (n *demoNode) awaitExit(ctx context.Context, id string) (*runtimeapi.ContainerStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		response, err := n.client.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id})
		if err != nil || response.GetStatus().GetState() == runtimeapi.ContainerState_CONTAINER_EXITED {
			return response.GetStatus(), err
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// exec runs a command in a container and returns its output.
func (n *demoNode) exec(ctx context.Context, id string, command ...string) (string, error) {
	response, err := n.client.ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: command, Timeout: 30})
	if err != nil {
		return "", err
	}
	if response.GetExitCode() != 0 {
		return "", fmt.Errorf("exit code %d: %s", response.GetExitCode(), response.GetStderr())
	}
	return string(response.GetStdout()), nil
}
