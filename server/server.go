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
	// largestResponse: a list is as large as the objects in it, and refusing to
	// send it would hide all of them. What is too large for a client fails there.
	largestResponse = math.MaxInt32
)

// callWorkers goroutines answer one call after the other, on stacks that have grown
// already; growing stacks was 8 % of the daemon's time in calls of PodSandboxStatus.
// Calls beyond them get a goroutine of their own.
const callWorkers = 4

// New makes a gRPC server that serves the runtime and the images.
// traces follows each call from its begin to its end; nil if there are no traces.
func New(runtime *Runtime, images *image.Store, traces grpcstats.Handler, logger *slog.Logger) *grpc.Server {
	calls := calls{logger: logger, work: &runtime.work, runtime: runtime, images: images, observe: runtime.Observe}
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(largestRequest),
		grpc.MaxSendMsgSize(largestResponse),
		grpc.UnaryInterceptor(calls.unary),
		grpc.StreamInterceptor(calls.stream),
		grpc.NumStreamWorkers(callWorkers),
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
	logger *slog.Logger
	work   *work
	// runtime knows which pod an id is of; nil where nothing does.
	runtime *Runtime
	// images knows the size of one that was pulled; nil where nothing does.
	images  *image.Store
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
	defer func(began time.Time) {
		if reason := recover(); reason != nil {
			err = c.panicked(info.FullMethod, reason)
		}
		ids := c.made(response)
		note(ctx, ids)
		c.end(ctx, info.FullMethod, slices.Concat(about, ids), began, &err)
	}(time.Now())
	leave, err := c.work.enter(info.FullMethod)
	if err != nil {
		return nil, err
	}
	defer leave()
	return handler(ctx, request)
}

func (c calls) stream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	defer func(began time.Time) {
		if reason := recover(); reason != nil {
			err = c.panicked(info.FullMethod, reason)
		}
		c.end(stream.Context(), info.FullMethod, nil, began, &err)
	}(time.Now())
	leave, err := c.work.enter(info.FullMethod)
	if err != nil {
		return err
	}
	defer leave()
	return handler(server, stream)
}

// panicked is the error of a call that panicked.
func (c calls) panicked(method string, reason any) error {
	c.logger.Error("panic in a call", "method", method, "reason", reason, "stack", string(debug.Stack()))
	return status.Error(codes.Internal, fmt.Sprintf("%s: panic: %v", method, reason))
}

func (c calls) end(ctx context.Context, method string, pairs []any, began time.Time, err *error) {
	*err = grpcError(*err)
	if c.observe != nil {
		c.observe(method, status.Code(*err).String(), time.Since(began))
	}
	c.log(ctx, method, pairs, began, *err)
}

// work counts the calls under way that change something.
type work struct {
	mu    sync.Mutex
	count int
	// idle is closed when the last one ends; nil before drain.
	idle chan struct{}
}

// changing are the calls that are waited for when the daemon ends. All others
// only read, and are answered to the end.
var changing = []string{
	"RunPodSandbox", "StopPodSandbox", "RemovePodSandbox", "UpdatePodSandboxResources",
	"CreateContainer", "StartContainer", "StopContainer", "RemoveContainer", "UpdateContainerResources",
	"ReopenContainerLog", "ExecSync", "CheckpointContainer", "CheckpointPod", "RestorePod", "UpdateRuntimeConfig",
	"PullImage", "RemoveImage",
}

var errDraining = fmt.Errorf("minicri is shutting down, ask the next daemon: %w", errdefs.ErrUnavailable)

// enter counts a call in, and refuses it when the daemon is about to end.
func (w *work) enter(method string) (leave func(), err error) {
	if !slices.Contains(changing, path.Base(method)) {
		return func() {}, nil
	}
	return w.begin()
}

func (w *work) begin() (leave func(), err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.idle != nil {
		return nil, errDraining
	}
	w.count++
	return w.leave, nil
}

func (w *work) leave() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.count--
	if w.count == 0 && w.idle != nil {
		close(w.idle)
	}
}

// Enter counts something in that Drain waits for and that is no call of the CRI, until
// leave is called; it refuses it after Drain.
func (r *Runtime) Enter() (leave func(), err error) { return r.work.begin() }

// Drain refuses the calls that change something from now on, with
// errdefs.ErrUnavailable, and waits for those under way, no longer than the
// context. The others are still answered. It is called once.
func (r *Runtime) Drain(ctx context.Context) error {
	w := &r.work
	w.mu.Lock()
	w.idle = make(chan struct{})
	if w.count == 0 {
		close(w.idle)
	}
	w.mu.Unlock()
	select {
	case <-w.idle:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// grpcError gives an error of the domain its gRPC code. This is the only such
// table; an error that already has a code keeps it.
func grpcError(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	if name := kubeletName(err); name != "" {
		return withDetails(codes.Unknown, name+": "+errtext.Of(err)+advice(err), err)
	}
	return withDetails(codeOf(err), errtext.Of(err), err)
}

// kubeletName is the text by which the kubelet recognizes an error and shows it as a
// pod's reason. It looks for it at the beginning of the message, and only in
// errors of the code Unknown (pkg/kubelet/cri/remote, pkg/kubelet/images).
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

func codeOf(err error) codes.Code {
	for _, row := range []struct {
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
	} {
		if row.is(err) {
			return row.code
		}
	}
	return codes.Unknown
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
