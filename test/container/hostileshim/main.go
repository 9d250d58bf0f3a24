// Command hostileshim is a shim of containerd's that lies or dies, or hangs in a
// call: in which way says the name that it is run by, containerd-shim-MODE-v2.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/emptypb"
)

func main() {
	verb := os.Args[len(os.Args)-1]
	mode := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(os.Args[0]), "containerd-shim-"), "-v2")
	var err error
	switch verb {
	case "start":
		err = start(mode)
	case "delete":
		err = runReal(os.Stdout)
	case "serve":
		err = serve(mode)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// start says where the shim serves, or something else.
func start(mode string) error {
	switch mode {
	case "rubbish":
		fmt.Print(strings.Repeat("\x00{rubbish", 1<<20))
		return nil
	case "longpath":
		fmt.Print("unix:///" + strings.Repeat("x", 200))
		return nil
	case "grpc":
		fmt.Print(`{"version": 3, "address": "unix:///tmp/x", "protocol": "grpc"}`)
		return nil
	case "nowhere":
		fmt.Print("unix:///no/such/socket")
		return nil
	}
	command := exec.Command("/proc/self/exe", "serve")
	if strings.HasPrefix(mode, hangs) {
		said := &strings.Builder{}
		if err := runReal(said); err != nil {
			return err
		}
		command.Env = append(os.Environ(), realAddress+"="+strings.TrimPrefix(strings.TrimSpace(said.String()), "unix://"))
	}
	listener, err := net.Listen("unix", fmt.Sprintf("@hostile-%d", os.Getpid()))
	if err != nil {
		return err
	}
	socket, err := listener.(*net.UnixListener).File()
	if err != nil {
		return err
	}
	command.Args[0] = os.Args[0]
	command.ExtraFiles = []*os.File{socket}
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := command.Start(); err != nil {
		return err
	}
	version := 3
	if strings.HasPrefix(mode, hangs) {
		version = 2 // as the real one
	}
	fmt.Printf(`{"version": %d, "address": "unix://@hostile-%d", "protocol": "ttrpc"}`, version, os.Getpid())
	return nil
}

func serve(mode string) error {
	listener, err := net.FileListener(os.NewFile(3, "socket"))
	if err != nil {
		return err
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		return err
	}
	if call, ok := strings.CutPrefix(mode, hangs); ok {
		return serveReal(server, listener, call)
	}
	answer := func(what func() (any, error)) ttrpc.Method {
		return func(context.Context, func(any) error) (any, error) { return what() }
	}
	methods := map[string]ttrpc.Method{
		"Connect": answer(func() (any, error) { return &task.ConnectResponse{ShimPid: uint32(os.Getpid())}, nil }),
		"Create":  answer(func() (any, error) { return &task.CreateTaskResponse{Pid: 1}, nil }),
		"Kill":    answer(func() (any, error) { return &emptypb.Empty{}, nil }),
		"Delete":  answer(func() (any, error) { return &task.DeleteResponse{}, nil }),
		"Shutdown": answer(func() (any, error) {
			os.Exit(0)
			return nil, nil
		}),
	}
	switch mode {
	case "shimpid":
		methods["Connect"] = answer(func() (any, error) { return &task.ConnectResponse{ShimPid: 1}, nil })
	case "dies":
		methods["Create"] = answer(func() (any, error) {
			os.Exit(9)
			return nil, nil
		})
	}
	server.RegisterService("containerd.task.v3.Task", &ttrpc.ServiceDesc{Methods: methods})
	return server.Serve(context.Background(), listener)
}
