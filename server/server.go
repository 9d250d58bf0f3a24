// Package server is the CRI surface of minicri: one file for each noun of the
// API. A method checks what is about the form of the request, calls the
// package that does the work, and turns the result into the API's messages.
// Nothing here mounts, starts a process or writes a file. The only state are the
// subscriptions to events (events.go) and the calls under way, each under
// a lock of its own.
//
// Errors of the domain are turned into gRPC codes in one place, by the
// interceptors, with one table. Lists are streamed in pieces
// that are cut by size (list.go).
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
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
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
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/nri"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/stats"
	"github.com/minicri/minicri/stream"
)

// Runtime implements runtime.v1.RuntimeService. What it does not implement
// answers Unimplemented, by the embedded type.
type Runtime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	Sandboxes  *sandbox.Store
	Containers *container.Store
	Networks   *network.CNI
	Stats      *stats.Meter
	Streams    *stream.Server
	Events     *Broadcaster
	Info       Info
	// Plugins are those of NRI.
	Plugins *nri.Plugins
	// Observe measures each call that has ended; nil if nothing does.
	Observe func(method, code string, took time.Duration)

	work work
}

// Info is what the runtime reports about itself.
type Info struct {
	Version       string
	SystemdCgroup bool
	Handlers      *handler.Set
	Machine       machine.Machine
	// Config is the configuration in effect, for the verbose status.
	Config func() any
}

const (
	// largestRequest is what the kubelet accepts from a runtime, and more than it
	// ever sends.
	largestRequest = 16 << 20
	// largestResponse: refusing to send a list would hide all objects in it. What is too large
	// for a client fails there.
	largestResponse = math.MaxInt32
)

// New makes a gRPC server that serves the runtime and the images.
// traces follows each call from its begin to its end; nil if there are no traces.
func New(runtime *Runtime, images *image.Store, traces grpcstats.Handler, logger *slog.Logger) *grpc.Server {
	calls := calls{logger: logger, work: &runtime.work, runtime: runtime, images: images, observe: runtime.Observe}
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(largestRequest),
		grpc.MaxSendMsgSize(largestResponse),
		grpc.UnaryInterceptor(calls.unary),
		grpc.StreamInterceptor(calls.stream),
	}
	if traces != nil {
		options = append(options, grpc.StatsHandler(traces))
	}
	server := grpc.NewServer(options...)
	runtimeapi.RegisterRuntimeServiceServer(server, runtime)
	runtimeapi.RegisterImageServiceServer(server, NewImageServer(images, runtime.Info.Handlers.Names, runtime.Sandboxes))
	return server
}

// calls intercepts every call: its error gets a code, a panic becomes an error
// of this call alone, and both are logged.
type calls struct {
	logger  *slog.Logger
	work    *work
	runtime *Runtime     // knows which pod an id is of
	images  *image.Store // knows the size of one that was pulled
	observe func(method, code string, took time.Duration)
}

func (c calls) unary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (response any, err error) {
	// Look up the names before the call, which may remove the pod. Calls that only read
	// are logged for debugging alone.
	var about []any
	name := path.Base(info.FullMethod)
	if slices.Contains(changing, name) || milestones[name] != "" || c.logger.Enabled(ctx, slog.LevelDebug) {
		about = c.about(request)
		note(ctx, about)
	}
	err = c.run(ctx, info.FullMethod, &about, func() (err error) {
		response, err = handler(ctx, request)
		made := c.made(response)
		note(ctx, made)
		about = append(about, made...)
		return err
	})
	return response, err
}

func (c calls) stream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return c.run(stream.Context(), info.FullMethod, new([]any), func() error { return handler(server, stream) })
}

// run makes a call, and logs it with what it is about.
func (c calls) run(ctx context.Context, method string, about *[]any, call func() error) (err error) {
	began := time.Now()
	defer func() {
		if reason := recover(); reason != nil {
			c.logger.Error("panic in a call", "method", method, "reason", reason, "stack", string(debug.Stack()))
			err = status.Error(codes.Internal, fmt.Sprintf("%s: panic: %v", method, reason))
		}
		err = grpcError(err)
		if c.observe != nil {
			c.observe(method, status.Code(err).String(), time.Since(began))
		}
		c.log(ctx, method, *about, began, err)
	}()
	if slices.Contains(changing, path.Base(method)) {
		leave, err := c.work.begin()
		if err != nil {
			return err
		}
		defer leave()
	}
	return call()
}

// work counts the calls under way that change something.
type work struct {
	mu      sync.Mutex // guards ended, and that nothing is added after it
	ended   bool
	running sync.WaitGroup
}

// changing are the calls that are waited for when the daemon ends. All others are answered to
// the end.
var changing = []string{
	"RunPodSandbox", "StopPodSandbox", "RemovePodSandbox", "UpdatePodSandboxResources",
	"CreateContainer", "StartContainer", "StopContainer", "RemoveContainer", "UpdateContainerResources",
	"ReopenContainerLog", "ExecSync", "CheckpointContainer", "CheckpointPod", "RestorePod", "UpdateRuntimeConfig",
	"PullImage", "RemoveImage",
}

var errDraining = fmt.Errorf("minicri is shutting down, ask the next daemon: %w", errdefs.ErrUnavailable)

func (w *work) begin() (leave func(), err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return nil, errDraining
	}
	w.running.Add(1)
	return w.running.Done, nil
}

// Enter counts something in that is no call of the CRI and that Drain waits for; it is refused
// after Drain.
func (r *Runtime) Enter() (leave func(), err error) { return r.work.begin() }

// Drain refuses calls that change something from now on, with errdefs.ErrUnavailable, and waits
// for those under way, no longer than the context. It is called once.
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

// milestones are the calls that are logged at the level info. The kubelet probes by ExecSync:
// only Exec and Attach are a user's.
var milestones = map[string]string{
	"RunPodSandbox": "pod made", "RemovePodSandbox": "pod removed", "StartContainer": "container started",
	"Exec": "exec", "Attach": "attach", "PullImage": "image pulled",
}

// about says which pod, container and image a request is about, as pairs of the log.
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

// made are the ids that an answer brings, and the size of an image.
func (c calls) made(response any) []any {
	switch r := response.(type) {
	case *runtimeapi.RunPodSandboxResponse:
		return []any{"sandbox", r.GetPodSandboxId()}
	case *runtimeapi.CreateContainerResponse:
		return []any{"id", r.GetContainerId()}
	case *runtimeapi.PullImageResponse:
		if pulled, err := c.images.Get(r.GetImageRef()); err == nil {
			return []any{"id", r.GetImageRef(), "size", pulled.Size}
		}
	}
	return nil
}

// log writes the line of a call. A failure of a call that changes something is an error whatever
// its code, but for probes; a kubelet often asks to hear NotFound.
func (c calls) log(ctx context.Context, method string, pairs []any, began time.Time, err error) {
	name := path.Base(method)
	level, text := slog.LevelDebug, "call"
	switch {
	case err != nil && name != "ExecSync" && (slices.Contains(changing, name) || milestones[name] != ""):
		level, text = slog.LevelError, "call failed"
	case err != nil && status.Code(err) != codes.NotFound:
		level, text = slog.LevelWarn, "call failed"
	case err == nil && milestones[name] != "":
		level, text = slog.LevelInfo, milestones[name]
	}
	c.logger.Log(ctx, level, text, append(append([]any{"method", name}, pairs...), "took", time.Since(began), "err", err)...)
}

// note adds the same to the span of the call.
func note(ctx context.Context, pairs []any) {
	span := trace.SpanFromContext(ctx)
	if !span.IsRecording() {
		return
	}
	for i := 0; i+1 < len(pairs); i += 2 {
		span.SetAttributes(attribute.String(pairs[i].(string), fmt.Sprint(pairs[i+1])))
	}
}

// grpcError gives an error of the domain its gRPC code. This is the only place that
// does; an error that already has a code keeps it.
func grpcError(err error) error {
	if _, ok := status.FromError(err); ok { // nil, too
		return err
	}
	if name := kubeletName(err); name != "" {
		return withDetails(codes.Unknown, name+": "+errtext.Of(err)+advice(err), err)
	}
	for _, kind := range kinds {
		if kind.is(err) {
			return withDetails(kind.code, errtext.Of(err), err)
		}
	}
	return withDetails(codes.Unknown, errtext.Of(err), err)
}

// kubeletName is the text by which the kubelet recognizes an error and shows it as a pod's
// reason: at the beginning of the message, in errors of the code Unknown
// (pkg/kubelet/cri/remote, pkg/kubelet/images).
func kubeletName(err error) string {
	switch {
	case errors.Is(err, image.ErrVerification):
		return crierrors.ErrSignatureValidationFailed.Error()
	case errors.Is(err, image.ErrRegistryUnavailable):
		return crierrors.ErrRegistryUnavailable.Error()
	case errors.Is(err, container.ErrImageVolume):
		return crierrors.ErrImageVolumeMountFailed.Error()
	}
	return ""
}

// advice says what to do about an error whose cause is not this node.
func advice(err error) string {
	if errors.Is(err, image.ErrRegistryUnavailable) {
		return "; see whether the registry answers from this node, or name a mirror of it in hosts.toml (images.certs_dirs)"
	}
	return ""
}

// kinds are the codes of the domain's kinds of errors; of an error with several the
// first counts.
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

// ListMetricDescriptors names the metrics that ListPodSandboxMetrics gives.
func (r *Runtime) ListMetricDescriptors(context.Context, *runtimeapi.ListMetricDescriptorsRequest) (*runtimeapi.ListMetricDescriptorsResponse, error) {
	return &runtimeapi.ListMetricDescriptorsResponse{Descriptors: stats.Descriptors()}, nil
}

// ListPodSandboxMetrics measures the pods that are ready, and their containers.
func (r *Runtime) ListPodSandboxMetrics(ctx context.Context, _ *runtimeapi.ListPodSandboxMetricsRequest) (*runtimeapi.ListPodSandboxMetricsResponse, error) {
	return &runtimeapi.ListPodSandboxMetricsResponse{PodMetrics: r.Stats.Metrics(ctx, r.measurablePods(nil))}, nil
}

// StreamPodSandboxMetrics sends the same list in pieces.
func (r *Runtime) StreamPodSandboxMetrics(_ *runtimeapi.StreamPodSandboxMetricsRequest, stream runtimeapi.RuntimeService_StreamPodSandboxMetricsServer) error {
	return sendPieces(r.Stats.Metrics(stream.Context(), r.measurablePods(nil)), func(piece []*runtimeapi.PodSandboxMetrics) error {
		return stream.Send(&runtimeapi.StreamPodSandboxMetricsResponse{PodSandboxMetrics: piece})
	})
}
