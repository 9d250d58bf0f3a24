package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/doctor"
	"github.com/minicri/minicri/internal/id"
)

// statusLimit is how long the daemon may take for its status; it asks programs for it.
const statusLimit = 30 * time.Second

// askRuntime asks the daemon that serves.
func askRuntime(socket string, ask func(runtimeapi.RuntimeServiceClient) error) error {
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20)))
	if err != nil {
		return err
	}
	defer connection.Close()
	return ask(runtimeapi.NewRuntimeServiceClient(connection))
}

// hasEnded asks the daemon whether a pod has ended, or is gone.
func hasEnded(ctx context.Context, socket, id string) bool {
	var answer *runtimeapi.PodSandboxStatusResponse
	err := askRuntime(socket, func(runtime runtimeapi.RuntimeServiceClient) (err error) {
		answer, err = runtime.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
		return err
	})
	return status.Code(err) == codes.NotFound || err == nil && answer.GetStatus().GetState() != runtimeapi.PodSandboxState_SANDBOX_READY
}

// verboseStatus is what the daemon says of itself, nil if none serves.
func verboseStatus(ctx context.Context, socket string) (answer *runtimeapi.StatusResponse, err error) {
	if serves, err := daemonServes(ctx, socket); !serves {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, statusLimit)
	defer cancel()
	err = askRuntime(socket, func(runtime runtimeapi.RuntimeServiceClient) (err error) {
		answer, err = runtime.Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
		return withoutCode(err)
	})
	return answer, err
}

// askDaemon returns what the daemon says of itself, nil if none serves, and what is
// wrong with NRI plugins, nil if it does not say.
func askDaemon(ctx context.Context, socket string) (_ *doctor.Daemon, plugins []error) {
	answer, err := verboseStatus(ctx, socket)
	switch {
	case err != nil:
		return &doctor.Daemon{Err: err}, nil
	case answer == nil:
		return nil, nil
	}
	said := &doctor.Daemon{}
	for _, c := range answer.GetStatus().GetConditions() {
		said.Conditions = append(said.Conditions, doctor.Condition{Type: c.GetType(), Holds: c.GetStatus(), Message: c.GetMessage()})
	}
	if text := answer.GetInfo()["nriProblems"]; text != "" { // NRI is on
		var texts struct{ Items []string }
		if err := json.Unmarshal([]byte(text), &texts); err != nil {
			said.Err = fmt.Errorf("read nriProblems of the status: %w", err)
		}
		plugins = []error{}
		for _, text := range texts.Items {
			plugins = append(plugins, errors.New(text))
		}
	}
	return said, plugins
}

// runningConfig has the keys of the daemon that serves, nil if none does.
func runningConfig(ctx context.Context, socket string) (map[string]any, error) {
	answer, err := verboseStatus(ctx, socket)
	if err != nil || answer == nil {
		return nil, err
	}
	return keysIn([]byte(answer.GetInfo()["config"]))
}

// keysIn are the keys of a configuration in JSON, with their tables, and their values.
func keysIn(document []byte) (map[string]any, error) {
	var tables map[string]any
	if err := json.Unmarshal(document, &tables); err != nil {
		return nil, err
	}
	keys := make(map[string]any)
	addKeys(keys, "", tables)
	return keys, nil
}

func addKeys(keys map[string]any, prefix string, table map[string]any) {
	for name, value := range table {
		if inner, is := value.(map[string]any); is {
			addKeys(keys, prefix+name+".", inner)
			continue
		}
		keys[prefix+name] = value
	}
}

// withoutCode returns the message of a gRPC status, in the words of the daemon's log:
// of its code it has what the message leaves out (package errtext).
func withoutCode(err error) error {
	answer, ok := status.FromError(err)
	if !ok || err == nil {
		return err
	}
	kind := map[codes.Code]error{codes.NotFound: errdefs.ErrNotFound, codes.AlreadyExists: errdefs.ErrAlreadyExists}[answer.Code()]
	if kind != nil && !strings.Contains(answer.Message(), kind.Error()) {
		return fmt.Errorf("%s: %w", answer.Message(), kind)
	}
	return errors.New(answer.Message())
}

// tryPod runs a pod as the kubelet would, and removes it.
func tryPod(ctx context.Context, c *config.Config) doctor.Finding {
	finding := doctor.Finding{Subject: "pod", Grade: doctor.Problem, Advice: "'minicri timeline minicri-check' shows its steps"}
	serves, err := daemonServes(ctx, c.Socket)
	if err != nil {
		finding.Message, finding.Advice = "not run: "+err.Error(), ""
		return finding
	}
	if !serves {
		finding.Message, finding.Advice = "not run: no daemon serves "+c.Socket, "start it: systemctl start minicri"
		return finding
	}
	began := time.Now()
	var address string
	err = askRuntime(c.Socket, func(runtime runtimeapi.RuntimeServiceClient) (err error) {
		address, err = runAndRemove(ctx, c, runtime)
		return err
	})
	if err != nil {
		finding.Message = err.Error()
		return finding
	}
	message := fmt.Sprintf("ran with address %s, and was removed; %v", address, time.Since(began).Round(time.Millisecond))
	return doctor.Finding{Subject: "pod", Grade: doctor.Good, Message: message}
}

// runAndRemove returns the address of the pod.
func runAndRemove(ctx context.Context, c *config.Config, runtime runtimeapi.RuntimeServiceClient) (address string, err error) {
	limited, cancel := context.WithTimeout(ctx, time.Duration(c.Limits.Run))
	defer cancel()
	answer, err := runtime.RunPodSandbox(limited, &runtimeapi.RunPodSandboxRequest{Config: checkPod()})
	if err != nil {
		return "", fmt.Errorf("it cannot be run: %w", withoutCode(err))
	}
	pod := answer.GetPodSandboxId()
	defer func() { // an interrupt must not leave it
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Duration(c.Limits.Destroy))
		defer cancel()
		_, stopErr := runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: pod})
		_, removeErr := runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: pod})
		if left := errors.Join(withoutCode(stopErr), withoutCode(removeErr)); left != nil {
			err = errors.Join(err, fmt.Errorf("it cannot be removed: %w", left))
		}
	}()
	status, err := runtime.PodSandboxStatus(limited, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod})
	if err != nil {
		return "", fmt.Errorf("its status: %w", withoutCode(err))
	}
	if state := status.GetStatus().GetState(); state != runtimeapi.PodSandboxState_SANDBOX_READY {
		return "", fmt.Errorf("it was run and is not ready: %v", state)
	}
	return status.GetStatus().GetNetwork().GetIp(), nil
}

// checkPod has namespaces of its own. Each has another uid, so that two checks do not
// meet.
func checkPod() *runtimeapi.PodSandboxConfig {
	return &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "minicri-check", Namespace: "minicri", Uid: id.New()},
		Hostname: "minicri-check",
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
			NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
		}},
	}
}
