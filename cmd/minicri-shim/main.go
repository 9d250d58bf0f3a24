// GOMAXPROCS by cgroup quota costs a parse of mountinfo in every process.
//
//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0

// Command minicri-shim is the parent of the processes of pods. It is one binary in
// several roles: the resident supervisor (serve, and check-state and standby for its
// upgrades), libcontainer's init (re-executed inside the new namespaces), and the
// process that runs a hook.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/minicri/minicri/shim/runtime"
	"github.com/minicri/minicri/shim/supervisor"
	"github.com/opencontainers/runc/libcontainer"
	_ "github.com/opencontainers/runc/libcontainer/nsenter" // joins namespaces in C, before the Go runtime starts
)

// name is what ps and top show (proc_pid_comm(5)).
const name = "minicri-shim"

const usage = `usage: minicri-shim COMMAND [flags]
  serve        supervise the processes of pods until asked to shut down
  version      print the version
and, for itself only:
  init         libcontainer's init
  check-state  check that this build can take over the state of another one
  standby      continue to serve if the new build of an upgrade does not
  hook         run a hook of a container`

// libcontainer's init must run on the process's main thread, which Go promises
// only before main. It never returns.
func init() {
	if len(os.Args) > 1 && os.Args[1] == "init" {
		libcontainer.Init()
	}
}

func main() {
	if len(os.Args) < 2 {
		fail(usage)
	}
	// Executed from memory, its name would be the number of a descriptor.
	_ = os.WriteFile("/proc/self/comm", []byte(name), 0)
	switch command, args := os.Args[1], os.Args[2:]; command {
	case "serve":
		os.Exit(serve(command, args, supervisor.Serve.Run))
	case "check-state":
		os.Exit(serve(command, args, func(s supervisor.Serve, _ context.Context, _ *slog.Logger) error { return s.CheckState() }))
	case supervisor.StandbyCommand:
		if err := supervisor.Standby(args); err != nil {
			fmt.Fprintln(os.Stderr, "minicri-shim standby:", err)
			os.Exit(1)
		}
	case runtime.HookCommand:
		os.Exit(runtime.RunHook(args))
	case "version":
		printVersion()
	default:
		fail(fmt.Sprintf("minicri-shim: unknown command %q\n%s", command, usage))
	}
}

func serve(command string, args []string, do func(supervisor.Serve, context.Context, *slog.Logger) error) int {
	var s supervisor.Serve
	readyFD, handoverFD := 0, 0
	flags := flag.NewFlagSet("minicri-shim "+command, flag.ExitOnError)
	flags.StringVar(&s.Dir, "dir", "", "the group's directory, absolute")
	flags.BoolVar(&s.SystemdCgroup, "systemd-cgroup", false, "let systemd make the cgroups: cgroupsPath is slice:prefix:name")
	flags.Func("cgroup", "cgroup directory to move into, may be repeated", func(dir string) error {
		s.Cgroups = append(s.Cgroups, dir)
		return nil
	})
	flags.IntVar(&readyFD, "ready-fd", 0, "descriptor that gets \"ready\" once the sockets serve")
	flags.StringVar(&s.Build, "build", "", "what names this build")
	flags.IntVar(&handoverFD, "handover-fd", 0, "descriptor of what an upgrade hands over")
	_ = flags.Parse(args) // ExitOnError
	if handoverFD > 0 {
		syscall.CloseOnExec(handoverFD)
		s.Handover = os.NewFile(uintptr(handoverFD), "handover")
	}
	if readyFD > 0 {
		syscall.CloseOnExec(readyFD)
		s.Ready = os.NewFile(uintptr(readyFD), "ready")
	}

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := do(s, ctx, slog.New(slog.NewTextHandler(os.Stderr, nil))); err != nil {
		fmt.Fprintln(os.Stderr, "minicri-shim "+command+":", err)
		return 1
	}
	return 0
}

func printVersion() {
	version := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		version = info.Main.Version
	}
	fmt.Println("minicri-shim", version)
}

func fail(message string) {
	fmt.Fprintln(os.Stderr, message)
	os.Exit(2)
}
