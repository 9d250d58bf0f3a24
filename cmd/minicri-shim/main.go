// GOMAXPROCS by cgroup quota costs a parse of mountinfo in every process.
//
//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0

// Command minicri-shim is the parent of the processes of pods: the resident supervisor (serve), which does not
// use libcontainer; a starter (start), which does one operation on a container; and libcontainer's
// init, re-executed inside the new namespaces.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/engine"
	"github.com/minicri/minicri/supervisor/serve"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/opencontainers/runc/libcontainer"
	_ "github.com/opencontainers/runc/libcontainer/nsenter" // joins namespaces in C, before the Go runtime starts
)

const usage = `usage: minicri-shim COMMAND [flags]
  serve        supervise the processes of pods until asked to shut down
  version      print the version of its protocol
and, for itself only:
  start        make a container or a process in one, as asked over a socket
  init         libcontainer's init`

// libcontainer's init must run on the main thread, which Go promises only before main. It never returns.
func init() {
	if len(os.Args) > 1 && os.Args[1] == "init" {
		libcontainer.Init()
	}
}

func main() {
	if len(os.Args) < 2 {
		fail(usage)
	}
	// Executed from memory, it would be named by the number of a descriptor (proc_pid_comm(5)).
	_ = os.WriteFile("/proc/self/comm", []byte("minicri-shim"), 0)
	switch command, args := os.Args[1], os.Args[2:]; command {
	case "serve":
		os.Exit(serveNode(args))
	case starter.Command:
		if err := engine.Main(); err != nil {
			fail(fmt.Sprintf("minicri-shim %s: %v", command, err))
		}
	case "version":
		fmt.Println("minicri-shim, protocol", api.Protocol) // no version: two builds of the same sources are the same
	default:
		fail(fmt.Sprintf("minicri-shim: unknown command %q\n%s", command, usage))
	}
}

func serveNode(args []string) int {
	var s serve.Serve
	flags := flag.NewFlagSet("minicri-shim serve", flag.ExitOnError)
	flags.StringVar(&s.Dir, "dir", "", "the group's directory, absolute")
	flags.BoolVar(&s.SystemdCgroup, "systemd-cgroup", false, "let systemd make the cgroups: cgroupsPath is slice:prefix:name")
	readyFD := flags.Int("ready-fd", 0, "descriptor that gets \"ready\" once the sockets serve")
	flags.StringVar(&s.Build, "build", "", "what names this build")
	flags.StringVar(&s.Version, "daemon-version", "", "version of the daemon that starts it")
	_ = flags.Parse(args) // ExitOnError
	if *readyFD > 0 {
		syscall.CloseOnExec(*readyFD)
		s.Ready = os.NewFile(uintptr(*readyFD), "ready")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := s.Run(ctx, slog.New(slog.NewTextHandler(os.Stderr, nil))); err != nil {
		fmt.Fprintln(os.Stderr, "minicri-shim serve:", err)
		if s.Ready != nil {
			fmt.Fprint(s.Ready, err) // it is closed by now if it served
		}
		return 1
	}
	return 0
}

func fail(message string) {
	fmt.Fprintln(os.Stderr, message)
	os.Exit(2)
}
