package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/doctor"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/network"
)

func checkCommand(cmd *cobra.Command, ids []string) error {
	l, err := look(cmd)
	if err != nil {
		return err
	}
	ctx, fix, force := cmd.Context(), l.has("fix"), l.has("force")
	switch {
	case force && !fix:
		return manual.Misused("--force has an effect only with --fix")
	case len(ids) > 0 && !force:
		return manual.Misused("minicri check takes no argument %q: only 'minicri check --fix --force ID' takes the id of a network "+
			"attachment, and abandons it", ids[0])
	case fix && len(l.Broken) > 0:
		return fmt.Errorf("--fix needs a configuration that is right, to know what is this node's: %w", errors.Join(l.Broken...))
	}
	findings, err := examine(ctx, l.Loaded)
	if err != nil {
		return err
	}
	if fix {
		findings = doctor.Fix(findings, force, ids)
	}
	if l.has("pod") {
		findings = append(findings, tryPod(ctx, l.Config))
	}
	detail := summary
	switch {
	case l.has("verbose"):
		detail = everything
	case l.has("quiet"):
		detail = problemsOnly
	}
	err = l.show(cmd, findings, func(output io.Writer) error { return printFindings(output, findings, detail) })
	if err != nil {
		return err
	}
	if !doctor.Clean(findings) {
		return errors.New("this node has problems, see above")
	}
	return nil
}

// examine looks at the node, and asks its daemon what only the daemon knows.
func examine(ctx context.Context, l *config.Loaded) ([]doctor.Finding, error) {
	c := l.Config
	identity, err := node.Read(c.Root)
	if errors.Is(err, fs.ErrPermission) {
		return []doctor.Finding{{Subject: "user", Grade: doctor.Problem, Message: err.Error(), Advice: "run it as root"}}, nil
	}
	if err != nil {
		return nil, err
	}
	shim, err := findShim(c.Shim)
	if err != nil {
		shim = c.Shim
	}
	m, err := machine.Read(c.Root)
	if err != nil {
		return nil, err
	}
	daemon, plugins := askDaemon(ctx, c.Socket)
	if plugins == nil {
		_, plugins = nriSource(c).Survey() // those that a daemon would not start
	}
	problems := slices.Concat(l.Broken, located(l, preflight(c, m)))
	if daemon == nil {
		problems = append(problems, located(l, obstacles(ctx, c, nil))...)
	}
	return doctor.Run(ctx, doctor.Options{
		Ended:    func(id string) bool { return daemon != nil && hasEnded(ctx, c.Socket, id) },
		Building: func() ([]string, error) { return building(ctx, c.Socket) },
		Config:   c, Daemon: daemon, Configuration: problems, Unknown: l.Unknown, Shim: shim, Node: identity, Handlers: handler.New(handlerSpecs(c), handler.Features{}),
		Plugins: plugins, Registries: image.CheckRegistries(c.Images.CertsDirs, c.Images.DockerConfig, c.Images.VerifierDir),
	}), nil
}

// detail is the amount of findings that check prints.
type detail int

const (
	problemsOnly detail = iota
	summary             // problems, then warnings, then the number of good findings
	everything
)

// printFindings prints problems first.
func printFindings(output io.Writer, findings []doctor.Finding, detail detail) error {
	marks := map[doctor.Grade]string{doctor.Good: "✓", doctor.Warning: "!", doctor.Problem: "✗"}
	table := tabwriter.NewWriter(output, 0, 0, 2, ' ', 0)
	counts := make(map[doctor.Grade]int)
	for _, grade := range []doctor.Grade{doctor.Problem, doctor.Warning, doctor.Good} {
		for _, f := range findings {
			if f.Grade != grade {
				continue
			}
			counts[grade]++
			shown := grade == doctor.Problem || f.Fixed || detail == everything || detail == summary && grade == doctor.Warning
			if !shown {
				continue
			}
			fmt.Fprintf(table, "%s %s\t%s\n", marks[grade], redact.Line(f.Subject), redact.Line(f.Message))
			if f.Advice != "" {
				fmt.Fprintf(table, "  \t→ %s\n", redact.Line(f.Advice))
			}
			if detail == everything {
				for _, id := range f.IDs {
					fmt.Fprintf(table, "  \t  %s\n", id)
				}
			}
		}
	}
	if err := table.Flush(); err != nil || detail == problemsOnly {
		return err
	}
	text := fmt.Sprintf("%s, %s, %d good", numberOf(counts[doctor.Problem], "problem"), numberOf(counts[doctor.Warning], "warning"), counts[doctor.Good])
	if detail == summary {
		text += " (--verbose lists them)"
	}
	_, err := fmt.Fprintln(output, text)
	return err
}

func numberOf(number int, thing string) string {
	if number != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", number, thing)
}

// writeJSON writes a value to a terminal, which must not obey its texts.
func writeJSON(output io.Writer, value any) error {
	document, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	_, err = output.Write(redact.PrintableJSON(append(document, '\n')))
	return err
}

func writeYAML(output io.Writer, value any) error {
	document, err := json.Marshal(value)
	if err != nil {
		return err
	}
	var read any
	if err := yaml.Unmarshal(redact.PrintableJSON(document), &read); err != nil {
		return err
	}
	encoder := yaml.NewEncoder(output)
	return errors.Join(encoder.Encode(read), encoder.Close())
}

const (
	askLimit    = 30 * time.Second // for what a command asks of the daemon, which runs programs to find its status
	runLimit    = 10 * time.Second // for a program that minicri debug bundle runs
	dialLimit   = time.Second      // for a connection to a daemon that may serve
	endLimit    = time.Minute      // for a pull or an import to end that was interrupted
	watchPeriod = 2 * time.Second  // between two screens of --watch

	followPeriod = 500 * time.Millisecond // between two looks of minicri timeline --follow
)

// daemonAt returns a client, which is open until the context ends.
func daemonAt(ctx context.Context, socket string) (runtimeapi.RuntimeServiceClient, error) {
	connection, err := connect(ctx, socket)
	if err != nil {
		return nil, err
	}
	return runtimeapi.NewRuntimeServiceClient(connection), nil
}

// connect returns a connection that the end of the context closes.
func connect(ctx context.Context, socket string) (*grpc.ClientConn, error) {
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20)))
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { _ = connection.Close() })
	return connection, nil
}

func hasEnded(ctx context.Context, socket, id string) bool {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	daemon, err := daemonAt(ctx, socket)
	if err != nil {
		return false
	}
	answer, err := daemon.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	return status.Code(err) == codes.NotFound || err == nil && answer.GetStatus().GetState() != runtimeapi.PodSandboxState_SANDBOX_READY
}

// building returns the ids of pods that are being made, none if no daemon serves.
func building(ctx context.Context, socket string) (ids []string, err error) {
	answer, err := verboseStatus(ctx, socket)
	list, listErr := items[struct{ ID string }](answer, "building")
	for _, one := range list {
		ids = append(ids, one.ID)
	}
	return ids, errors.Join(err, listErr)
}

// items returns a list of a verbose status.
func items[T any](answer *runtimeapi.StatusResponse, name string) ([]T, error) {
	text, there := answer.GetInfo()[name]
	if !there {
		return nil, nil
	}
	var list struct{ Items []T }
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return nil, fmt.Errorf("read %s of the status: %w", name, err)
	}
	return list.Items, nil
}

// verboseStatus returns nil if no daemon serves.
func verboseStatus(ctx context.Context, socket string) (answer *runtimeapi.StatusResponse, err error) {
	if serves, err := daemonServes(ctx, socket); !serves {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	daemon, err := daemonAt(ctx, socket)
	if err != nil {
		return nil, err
	}
	answer, err = daemon.Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
	return answer, withoutCode(err)
}

// askDaemon returns a nil Daemon if none serves, and nil plugins if it does not report their problems.
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
	orphans, err := items[string](answer, "orphanSnapshots")
	problems, nriErr := items[string](answer, "nriProblems")
	drifted, driftErr := items[network.Drift](answer, "driftedAttachments")
	networks, networkErr := items[string](answer, "networkProblems")
	said.Orphans, said.Drifted, said.Networks = orphans, drifted, networks
	said.Err = errors.Join(err, nriErr, driftErr, networkErr)
	if _, on := answer.GetInfo()["nriProblems"]; on {
		plugins = []error{}
	}
	for _, text := range problems {
		plugins = append(plugins, errors.New(text))
	}
	return said, plugins
}

// runningConfig returns the configuration keys of the daemon that serves, nil if none does.
func runningConfig(ctx context.Context, socket string) (map[string]any, error) {
	answer, err := verboseStatus(ctx, socket)
	if err != nil || answer == nil {
		return nil, err
	}
	return keysIn([]byte(answer.GetInfo()["config"]))
}

// keysIn returns the values in a JSON configuration by key, with the table: "nri.enabled".
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

// withoutCode returns the message of a gRPC status, with the kind that package errtext left to the code.
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

// tryPod runs and removes a pod as the kubelet would.
func tryPod(ctx context.Context, c *config.Config) doctor.Finding {
	failed := func(message, advice string) doctor.Finding {
		return doctor.Finding{Subject: "pod", Grade: doctor.Problem, Message: message, Advice: advice}
	}
	serves, err := daemonServes(ctx, c.Socket)
	switch {
	case err != nil:
		return failed("not run: "+err.Error(), "")
	case !serves:
		return failed("not run: no daemon serves "+c.Socket, "start it: systemctl start minicri")
	}
	began := time.Now()
	address, err := runAndRemove(ctx, c)
	if err != nil {
		return failed(err.Error(), "'minicri timeline minicri-check' shows its steps")
	}
	message := fmt.Sprintf("ran with address %s, and was removed; %v", address, time.Since(began).Round(time.Millisecond))
	return doctor.Finding{Subject: "pod", Grade: doctor.Good, Message: message}
}

// runAndRemove returns the address of the pod, which has namespaces of its own.
func runAndRemove(ctx context.Context, c *config.Config) (address string, err error) {
	connected, disconnect := context.WithCancel(context.WithoutCancel(ctx))
	defer disconnect()
	runtime, err := daemonAt(connected, c.Socket)
	if err != nil {
		return "", err
	}
	limited, cancel := context.WithTimeout(ctx, time.Duration(c.Limits.Run))
	defer cancel()
	answer, err := runtime.RunPodSandbox(limited, &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{
		// Two checks at once run two pods: each has its own uid.
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "minicri-check", Namespace: "minicri", Uid: object.NewID()},
		Hostname: "minicri-check",
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
			NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
		}},
	}})
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
