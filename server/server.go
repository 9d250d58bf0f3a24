package server

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"runtime/debug"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstats "google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/nri"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/stats"
)

// Runtime implements runtime.v1.RuntimeService. What it does not implement
// answers Unimplemented, by the embedded type.
type Runtime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	Sandboxes  *sandbox.Store
	Containers *container.Store
	Networks   *network.CNI
	Stats      *stats.Meter
	Streams    Streams
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

// Store is what the server asks of the image store.
type Store interface {
	Images
	Transfers
}

// callWorkers goroutines answer one call after the other, on stacks that have grown
// already; growing stacks was 8 % of the daemon's time in calls of PodSandboxStatus.
// Calls beyond them get a goroutine of their own.
const callWorkers = 4

// New makes a gRPC server that serves the runtime and the images.
// traces follows each call from its begin to its end; nil if there are no traces.
func New(runtime *Runtime, images Store, traces grpcstats.Handler, logger *slog.Logger) *grpc.Server {
	calls := calls{logger: logger, work: &runtime.work, observe: runtime.Observe}
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
	RegisterImageTransfer(server, images)
	return server
}

// calls intercepts every call: its error gets a code, a panic becomes an error
// of this call alone, and both are logged.
type calls struct {
	logger  *slog.Logger
	work    *work
	observe func(method, code string, took time.Duration)
}

func (c calls) unary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (response any, err error) {
	defer c.end(info.FullMethod, time.Now(), &err)
	leave, err := c.work.enter(info.FullMethod)
	if err != nil {
		return nil, err
	}
	defer leave()
	return handler(ctx, request)
}

func (c calls) stream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	defer c.end(info.FullMethod, time.Now(), &err)
	leave, err := c.work.enter(info.FullMethod)
	if err != nil {
		return err
	}
	defer leave()
	return handler(server, stream)
}

func (c calls) end(method string, began time.Time, err *error) {
	if reason := recover(); reason != nil {
		c.logger.Error("panic in a call", "method", method, "reason", reason, "stack", string(debug.Stack()))
		*err = status.Error(codes.Internal, fmt.Sprintf("%s: panic: %v", method, reason))
		c.measure(method, began, *err)
		return
	}
	*err = grpcError(*err)
	c.measure(method, began, *err)
	switch status.Code(*err) {
	case codes.OK, codes.NotFound:
		c.logger.Debug("call", "method", method, "took", time.Since(began), "err", *err)
	default:
		c.logger.Warn("call failed", "method", method, "took", time.Since(began), "err", *err)
	}
}

func (c calls) measure(method string, began time.Time, err error) {
	if c.observe != nil {
		c.observe(method, status.Code(err).String(), time.Since(began))
	}
}
