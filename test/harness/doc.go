// Package harness makes nodes for end-to-end tests: the real daemon with real
// CNI plugins, in a network namespace, directories and cgroups of its own.
//
//	n := harness.NewNode(t, harness.PortMap())
//	id := n.RunPod(n.PodConfig("web", harness.HostPort(8080, 80)))
//	n.Kill()
//	n.Start()
//	status, err := n.Runtime.PodSandboxStatus(ctx, ...)
//
// When the test ends, every pod that is left is stopped and removed, and the
// node has to hold what it held when it was idle before the first one. Then
// the daemon is stopped, and the machine has to hold what it held before the
// node was made. What differs fails the test, each thing by its name. Then it
// is taken away by force, so that the next test starts clean.
//
// A node's life: made and started (NewNode), any number of Kill, Stop, Start
// and Restart, closed by the test's end in whatever state it is. A Node belongs
// to its test's goroutine; Runtime, Image and RunInNetns may be used from
// others, but not during Start.
//
// Leaks are looked for in all processes that are in sight. So tests with nodes
// do not run in parallel, unless they have the option [Parallel], and they run
// under hack/in-netns, where no other work of the machine is in sight. Nothing
// is skipped: without root or without the binaries a test fails.
package harness
