// Package server is the CRI surface of minicri, with a file for each noun of the API. A method calls the package that
// does the work, which checks the form of the request (but for what only the API has), and turns the result into the
// API's messages. Nothing here mounts, starts a process or writes a file. The state is the subscriptions to events
// (events.go) and the calls under way, each under its own lock. Interceptors turn errors of the domain into
// gRPC codes, by one table. Lists are streamed in pieces (list.go).
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"path"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstats "google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/errtext"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/trace"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/nri"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/stats"
	"github.com/minicri/minicri/stream"
)

// Runtime implements runtime.v1.RuntimeService.
type Runtime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	Sandboxes  *sandbox.Store
	Containers *container.Store
	Networks   *network.CNI
	Images     *image.Store
	Stats      *stats.Meter
	Streams    *stream.Server
	Events     *Broadcaster
	Info       Info
	Plugins    *nri.Plugins
	Observe    func(method, code string, took time.Duration) // gets each call when it has ended; may be nil
	work       work
}

// Info is what the runtime reports about itself.
type Info struct {
	Version       string
	Started       time.Time // of the daemon
	SystemdCgroup bool
	Handlers      *handler.Set
	Machine       machine.Machine
	Config        func() any // the configuration in effect, for the verbose status
	// ContainerdSocket returns why the kubelet's cAdvisor does not find this runtime, "" if it does; may be nil.
	ContainerdSocket func() string
}

// New makes a gRPC server of the runtime and its images. traces, if not nil, follows each call.
func New(runtime *Runtime, traces grpcstats.Handler, logger *slog.Logger) *grpc.Server {
	calls := calls{logger: logger, runtime: runtime}
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(16 << 20),      // what the kubelet accepts from a runtime, and more than it sends
		grpc.MaxSendMsgSize(math.MaxInt32), // a list that is too large fails at its client
		grpc.UnaryInterceptor(calls.unary), grpc.StreamInterceptor(calls.stream),
	}
	if traces != nil {
		options = append(options, grpc.StatsHandler(traces))
	}
	server := grpc.NewServer(options...)
	runtimeapi.RegisterRuntimeServiceServer(server, runtime)
	runtimeapi.RegisterImageServiceServer(server, &ImageServer{runtime: runtime})
	registerContainerd(server, runtime)
	return server
}

// calls intercepts every call: it logs it, gives its error a code, and confines a panic to it.
type calls struct {
	logger  *slog.Logger
	runtime *Runtime // knows which pod an id is of, and the size of an image
}

func (c calls) unary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (response any, err error) {
	// The call may remove the pod, so look up its name first. Calls that only read are logged for debugging.
	var about []any
	name := path.Base(info.FullMethod)
	if slices.Contains(changing, name) || milestones[name] != "" || c.logger.Enabled(ctx, slog.LevelDebug) {
		about = c.about(request)
		trace.Note(ctx, about...)
	}
	err = c.run(ctx, info.FullMethod, &about, func() (err error) {
		if response, err = handler(ctx, request); err != nil {
			return err
		}
		made := c.made(response)
		trace.Note(ctx, made...)
		about = append(about, made...)
		return nil
	})
	return response, err
}

func (c calls) stream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return c.run(stream.Context(), info.FullMethod, new([]any), func() error { return handler(server, stream) })
}

func (c calls) run(ctx context.Context, method string, about *[]any, call func() error) (err error) {
	began := time.Now()
	defer func() {
		if reason := recover(); reason != nil {
			c.logger.Error("panic in a call", "method", method, "reason", reason, "stack", string(debug.Stack()))
			err = status.Error(codes.Internal, fmt.Sprintf("%s: panic: %v", method, reason))
		}
		err = grpcError(err)
		if c.runtime.Observe != nil {
			c.runtime.Observe(method, status.Code(err).String(), time.Since(began))
		}
		c.log(ctx, method, *about, began, err)
	}()
	if slices.Contains(changing, path.Base(method)) {
		leave, err := c.runtime.Enter()
		if err != nil {
			return err
		}
		defer leave()
	}
	return call()
}

type work struct {
	mu      sync.Mutex // guards ended, and that nothing is added after it
	ended   bool
	running sync.WaitGroup
}

// changing are the calls that Drain waits for.
var changing = []string{
	"RunPodSandbox", "StopPodSandbox", "RemovePodSandbox", "UpdatePodSandboxResources",
	"CreateContainer", "StartContainer", "StopContainer", "RemoveContainer", "UpdateContainerResources",
	"ReopenContainerLog", "ExecSync", "CheckpointContainer", "CheckpointPod", "RestorePod", "UpdateRuntimeConfig",
	"PullImage", "RemoveImage",
}

// Enter counts in what changes something, also what is no call of the CRI, for Drain to wait for. It fails after Drain.
func (r *Runtime) Enter() (leave func(), err error) {
	r.work.mu.Lock()
	defer r.work.mu.Unlock()
	if r.work.ended {
		return nil, fmt.Errorf("minicri is shutting down, ask the next daemon: %w", errdefs.ErrUnavailable)
	}
	r.work.running.Add(1)
	return r.work.running.Done, nil
}

// Drain refuses calls that change something, and waits for those under way. It is called once.
func (r *Runtime) Drain(ctx context.Context) error {
	r.work.mu.Lock()
	r.work.ended = true
	r.work.mu.Unlock()
	idle := make(chan struct{})
	go func() { // ends with the last call
		r.work.running.Wait()
		close(idle)
	}()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// milestones are the calls that are logged as info. ExecSync is not a user's: the kubelet probes by it.
var milestones = map[string]string{
	"RunPodSandbox": "pod made", "RemovePodSandbox": "pod removed", "StartContainer": "container started",
	"Exec": "exec", "Attach": "attach", "PullImage": "image pulled",
}

// about returns the pod, container and image of a request as pairs for the log.
func (c calls) about(request any) (pairs []any) {
	add := func(key, value string) {
		if value != "" {
			pairs = append(pairs, key, value)
		}
	}
	pod := func(config *runtimeapi.PodSandboxConfig) { // of one that is not made yet
		add("namespace", config.GetMetadata().GetNamespace())
		add("pod", config.GetMetadata().GetName())
	}
	sandbox := func(id string) {
		if sb, err := c.runtime.Sandboxes.Find(id); err == nil {
			pairs = append(pairs, sb.Names()...)
		} else {
			add("sandbox", id)
		}
	}
	if r, ok := request.(interface{ GetPodSandboxId() string }); ok && r.GetPodSandboxId() != "" {
		sandbox(r.GetPodSandboxId())
	}
	if r, ok := request.(interface{ GetContainerId() string }); ok && r.GetContainerId() != "" {
		if found, err := c.runtime.Containers.Find(r.GetContainerId()); err == nil {
			sandbox(found.SandboxID)
			add("container", found.Config().GetMetadata().GetName())
			add("image", found.Config().GetImage().GetImage())
		}
		add("id", r.GetContainerId())
	}
	if r, ok := request.(interface{ GetImage() *runtimeapi.ImageSpec }); ok {
		add("image", r.GetImage().GetImage())
		add("handler", r.GetImage().GetRuntimeHandler())
	}
	switch r := request.(type) {
	case *runtimeapi.RunPodSandboxRequest:
		pod(r.GetConfig())
		add("handler", r.GetRuntimeHandler())
	case *runtimeapi.CreateContainerRequest:
		add("container", r.GetConfig().GetMetadata().GetName())
		add("image", r.GetConfig().GetImage().GetImage())
	case *runtimeapi.PullImageRequest:
		pod(r.GetSandboxConfig())
	}
	return pairs
}

func (c calls) made(response any) []any {
	switch r := response.(type) {
	case *runtimeapi.RunPodSandboxResponse:
		return []any{"sandbox", r.GetPodSandboxId()}
	case *runtimeapi.CreateContainerResponse:
		return []any{"id", r.GetContainerId()}
	case *runtimeapi.PullImageResponse:
		if pulled, err := c.runtime.Images.Get(r.GetImageRef()); err == nil {
			return []any{"id", r.GetImageRef(), "size", pulled.Size}
		}
	}
	return nil
}

// log writes the line of a call. Failed changes are errors, except probes and faults of the request. NotFound of other
// calls is no warning: the kubelet often gets it.
func (c calls) log(ctx context.Context, method string, pairs []any, began time.Time, err error) {
	name := path.Base(method)
	level, text := slog.LevelDebug, "call"
	switch {
	case err != nil && name != "ExecSync" && (slices.Contains(changing, name) || milestones[name] != ""):
		level, text = slog.LevelError, "call failed"
		if slices.Contains(usersFaults, status.Code(err)) {
			level = slog.LevelWarn
		}
	case err != nil && status.Code(err) != codes.NotFound:
		level, text = slog.LevelWarn, "call failed"
	case err == nil && name == "RemovePodSandbox" && len(pairs) == 2: // the id alone: it was removed before
	case err == nil && milestones[name] != "":
		level, text = slog.LevelInfo, milestones[name]
	}
	pairs = append(append([]any{"method", name}, pairs...), "took", time.Since(began))
	if err != nil {
		pairs = append(pairs, "code", status.Code(err).String(), "err", status.Convert(err).Message())
	}
	c.logger.Log(ctx, level, text, pairs...)
}

// usersFaults are the codes of requests that a user or a registry has to change, not the administrator of the node.
var usersFaults = []codes.Code{
	codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition, codes.Unauthenticated,
	codes.PermissionDenied, codes.ResourceExhausted, codes.Canceled,
}

// grpcError is the only place that gives errors their gRPC code. It keeps a code that is there.
func grpcError(err error) error {
	if _, ok := status.FromError(err); ok { // nil, too
		return err
	}
	for _, known := range kubeletErrors {
		if errors.Is(err, known.ours) {
			return withDetails(codes.Unknown, known.kubelets.Error()+": "+errtext.Of(err), err)
		}
	}
	for _, kind := range kinds {
		if kind.is(err) {
			return withDetails(kind.code, errtext.Of(err), err)
		}
	}
	return withDetails(codes.Unknown, errtext.Of(err), err)
}

// kubeletErrors begin messages of the code Unknown, so that the kubelet recognizes them as a pod's reason
// (pkg/kubelet/cri/remote, pkg/kubelet/images).
var kubeletErrors = []struct{ ours, kubelets error }{
	{image.ErrVerification, crierrors.ErrSignatureValidationFailed},
	{image.ErrRegistryUnavailable, crierrors.ErrRegistryUnavailable},
	{container.ErrImageVolume, crierrors.ErrImageVolumeMountFailed},
}

// kinds are the codes of kinds of errors. If an error has several, the first counts.
var kinds = []struct {
	is   func(error) bool
	code codes.Code
}{
	{errdefs.IsInvalidArgument, codes.InvalidArgument},
	{errdefs.IsDataLoss, codes.DataLoss}, // containerd's content store adds "failed precondition" to it
	{errdefs.IsNotFound, codes.NotFound},
	{errdefs.IsAlreadyExists, codes.AlreadyExists},
	{errdefs.IsFailedPrecondition, codes.FailedPrecondition},
	{errdefs.IsNotImplemented, codes.Unimplemented},
	{errdefs.IsUnauthorized, codes.Unauthenticated},
	{errdefs.IsPermissionDenied, codes.PermissionDenied},
	{errdefs.IsResourceExhausted, codes.ResourceExhausted},
	{func(err error) bool { return errors.Is(err, context.DeadlineExceeded) }, codes.DeadlineExceeded},
	{func(err error) bool { return errors.Is(err, context.Canceled) }, codes.Canceled},
	{errdefs.IsUnavailable, codes.Unavailable},
}
