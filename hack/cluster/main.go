package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
)

// The roles that this program gives itself, by the first argument.
const (
	hubRole      = "--hub"      // DIR: the network between the nodes
	initRole     = "--init"     // DIR NODE: process 1 of a node, until its mounts are made
	servicesRole = "--services" // RUNTIME: process 1 of a node, from then on
	lookRole     = "--look"     // print what pods left on the node that it runs on
)

const usage = `cluster [--name NAME] COMMAND

  up [--nodes N] [--runtime minicri|containerd] [--kubelet-gates GATE=true,...] [--bare]
                          make a cluster of N nodes (2); wait until it is ready
  down                    remove the pods, look for leaks, end the nodes
  node add NODE           join another node
  node remove NODE        drain a node and end it
  node restart NODE       end its runtime and kubelet; pods stay
  node reboot NODE        cut its power and start it again
  load ARCHIVE            import images on every node
  upgrade-runtime DIR     put the minicri and minicri-shim of DIR on every node
  add-metrics             run metrics-server, which kubectl top asks
  prepare-e2e             build Kubernetes' own tests and import their images
  programs                print the directory of Kubernetes' programs
  offer DIR               put kubelet, kubeadm, kubectl and the images of a node into DIR
  exec NODE COMMAND...    run a command in a node
  kubectl ARG...          kubectl with the cluster's kubeconfig`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, arguments []string, output io.Writer) error {
	if len(arguments) > 0 {
		switch arguments[0] {
		case hubRole:
			return serveHub(arguments[1])
		case initRole:
			return becomeNode(arguments[1], arguments[2])
		case servicesRole:
			return runServices(ctx, arguments[1])
		case lookRole:
			return lookForLeaks(ctx, output)
		}
	}
	flags := flag.NewFlagSet("cluster", flag.ContinueOnError)
	flags.Usage = func() { fmt.Fprintln(flags.Output(), usage) }
	name := flags.String("name", "minicri", "which cluster")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("run it as root: it makes namespaces and mounts")
	}
	if err := checkName(*name); err != nil {
		return err
	}
	if flags.NArg() == 0 {
		return fmt.Errorf("a command is missing\n%s", usage)
	}
	return command(ctx, *name, flags.Args(), output)
}

// command runs one command. Those that change the cluster hold its lock; exec
// and kubectl do not, they may last.
func command(ctx context.Context, name string, arguments []string, output io.Writer) error {
	verb, rest := arguments[0], arguments[1:]
	switch verb {
	case "up":
		return upCommand(ctx, name, rest, output)
	case "programs", "offer":
		return buildCommand(ctx, rest, output)
	case "exec", "kubectl":
		c, err := load(name)
		if err != nil {
			return err
		}
		return c.interactive(ctx, verb, rest)
	}
	c, unlock, err := lock(name)
	if err != nil {
		return err
	}
	defer unlock()
	c.progress = newProgress(output)
	switch {
	case verb == "down" && len(rest) == 0:
		return c.down(ctx)
	case verb == "load" && len(rest) == 1:
		return c.importEverywhere(ctx, rest[0])
	case verb == "add-metrics" && len(rest) == 0:
		return c.addMetrics(ctx)
	case verb == "prepare-e2e" && len(rest) == 0:
		return c.prepareE2E(ctx)
	case verb == "upgrade-runtime" && len(rest) == 1:
		return c.upgradeRuntime(ctx, rest[0])
	case verb == "node" && len(rest) == 2:
		return c.nodeCommand(ctx, rest[0], rest[1])
	}
	return fmt.Errorf("no such command: %q\n%s", strings.Join(arguments, " "), usage)
}

// buildCommand builds what nodes are made of, for others than a cluster: it says where
// that is, or puts what a node without a registry needs into a directory.
func buildCommand(ctx context.Context, directory []string, output io.Writer) error {
	b, err := (&cluster{progress: newProgress(os.Stderr)}).build(ctx)
	if err != nil {
		return err
	}
	if len(directory) == 0 {
		fmt.Fprintln(output, b.programs)
		return nil
	}
	return b.offer(directory[0])
}

func upCommand(ctx context.Context, name string, arguments []string, output io.Writer) error {
	flags := flag.NewFlagSet("up", flag.ContinueOnError)
	nodes := flags.Int("nodes", 2, "how many nodes")
	runtime := flags.String("runtime", minicriRuntime, "minicri or containerd")
	bare := flags.Bool("bare", false, "nodes with a runtime and images alone: no kubelet runs, no control plane")
	gates := make(map[string]bool)
	flags.Func("kubelet-gates", "feature gates of the kubelets, GATE=true or GATE=false, separated by ','", func(list string) error { return readGates(list, gates) })
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if *nodes < 1 || *nodes > maxNodes {
		return fmt.Errorf("--nodes is %d, it has to be 1 to %d", *nodes, maxNodes)
	}
	if *runtime != minicriRuntime && *runtime != containerdRuntime {
		return fmt.Errorf("--runtime is %q, it has to be %s or %s", *runtime, minicriRuntime, containerdRuntime)
	}
	c, unlock, err := create(&cluster{Name: name, Runtime: *runtime, Gates: gates, Bare: *bare})
	if err != nil {
		return err
	}
	defer unlock()
	c.progress = newProgress(output)
	return c.up(ctx, *nodes)
}

func readGates(list string, gates map[string]bool) error {
	for pair := range strings.SplitSeq(list, ",") {
		gate, value, _ := strings.Cut(pair, "=")
		on, err := strconv.ParseBool(value)
		if err != nil {
			return fmt.Errorf("%q is not GATE=true or GATE=false", pair)
		}
		gates[gate] = on
	}
	return nil
}

func (c *cluster) nodeCommand(ctx context.Context, verb, name string) error {
	if verb == "add" {
		return c.addNode(ctx, name)
	}
	n, err := c.node(name)
	if err != nil {
		return err
	}
	switch verb {
	case "remove":
		return c.removeNode(ctx, n)
	case "restart":
		return c.restartNode(ctx, n)
	case "reboot":
		return c.rebootNode(ctx, n)
	}
	return fmt.Errorf("no such command: node %q\n%s", verb, usage)
}
