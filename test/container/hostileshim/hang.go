package main

import (
	"context"
	"io"
	"net"
	"os"
	"os/exec"

	"github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/emptypb"
)

const (
	hangs       = "hangsin" // the beginning of the modes that hang in a call
	realAddress = "REAL_SHIM"
)

// runReal runs a verb of containerd's own shim.
func runReal(output io.Writer) error {
	command := exec.Command("containerd-shim-runc-v2", os.Args[1:]...)
	command.Stdout, command.Stderr = output, os.Stderr
	return command.Run()
}

// serveReal passes every call on to containerd's own shim, but one that never
// ends. It ends with that shim.
func serveReal(server *ttrpc.Server, listener net.Listener, call string) error {
	connection, err := net.Dial("unix", os.Getenv(realAddress))
	if err != nil {
		return err
	}
	client := ttrpc.NewClient(connection, ttrpc.WithOnClose(func() { os.Exit(0) }), ttrpc.WithUnaryClientInterceptor(
		func(ctx context.Context, request *ttrpc.Request, response *ttrpc.Response, _ *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
			request.Metadata = append(request.Metadata, &ttrpc.KeyValue{Key: "containerd-namespace-ttrpc", Value: "minicri"})
			return invoke(ctx, request, response)
		}))
	task.RegisterTTRPCTaskService(server, &hanging{TTRPCTaskService: task.NewTTRPCTaskClient(client), call: call, connection: connection})
	return server.Serve(context.Background(), listener)
}

type hanging struct {
	task.TTRPCTaskService
	call       string
	connection net.Conn
}

func (h *hanging) in(call string) {
	if h.call == call {
		select {}
	}
}

func (h *hanging) Start(ctx context.Context, r *task.StartRequest) (*task.StartResponse, error) {
	h.in("start")
	return h.TTRPCTaskService.Start(ctx, r)
}

func (h *hanging) State(ctx context.Context, r *task.StateRequest) (*task.StateResponse, error) {
	h.in("state")
	return h.TTRPCTaskService.State(ctx, r)
}

func (h *hanging) Wait(ctx context.Context, r *task.WaitRequest) (*task.WaitResponse, error) {
	h.in("wait")
	return h.TTRPCTaskService.Wait(ctx, r)
}

func (h *hanging) Kill(ctx context.Context, r *task.KillRequest) (*emptypb.Empty, error) {
	h.in("kill")
	return h.TTRPCTaskService.Kill(ctx, r)
}

func (h *hanging) Delete(ctx context.Context, r *task.DeleteRequest) (*task.DeleteResponse, error) {
	h.in("delete")
	return h.TTRPCTaskService.Delete(ctx, r)
}

func (h *hanging) Shutdown(ctx context.Context, r *task.ShutdownRequest) (*emptypb.Empty, error) {
	h.in("shutdown")
	answer, err := h.TTRPCTaskService.Shutdown(ctx, r)
	_ = h.connection.Close() // the real one waits until no client is connected
	return answer, err
}
