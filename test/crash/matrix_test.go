package crash

import (
	"fmt"
	"slices"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/test/harness"
)

// row is a part of the matrix: an operation on a kind of pod, each of its
// points with each of the faults.
type row struct {
	operation operation
	pod       pod
	points    []string
	faults    []fault
}

// rows is the matrix; with -short, as make test has it, a part of it: an error
// and a kill at each step of a pod with a network of its own.
func rows() []row {
	if testing.Short() {
		some := []fault{fails, daemonKilled}
		return []row{
			{run, ownNetwork, ownNetwork.run, some},
			{stop, ownNetwork, stopping(ownNetwork), some},
			{removeStopped, ownNetwork, slices.Concat(removing()[:2], releaseAgain(), removing()[2:]), some},
			{undo, ownNetwork, teardown(ownNetwork), some},
			{run, userns, starter, []fault{starterKilled, shimKilled}},
		}
	}
	all := []fault{fails, daemonKilled, cancelled, deadlinePassed}
	ending := []fault{startedTwice, terminated}
	return []row{
		{run, ownNetwork, ownNetwork.run, ending},
		{stop, ownNetwork, stopping(ownNetwork), ending},
		{remove, ownNetwork, removing(), ending},
		{undo, ownNetwork, teardown(ownNetwork), ending},
		{recovery, ownNetwork, teardown(ownNetwork), []fault{startedTwice}},

		{run, ownNetwork, ownNetwork.run, all},
		{run, ownNetwork, ownNetwork.shim, []fault{shimKilled, shimAndDaemonKilled}},
		{run, ownNetwork, []string{"pod/prepare before"}, shimKilledInTime},
		{run, ownNetwork, withinLimit(ownNetwork.run), []fault{limitPassed}},
		{run, userns, userns.run, all},
		{run, userns, userns.shim, []fault{shimKilled, shimAndDaemonKilled}},
		{run, userns, starter, []fault{starterKilled, daemonKilled, shimKilled, shimAndDaemonKilled}},
		{run, hostNetwork, hostNetwork.run, all},
		{run, hostNetwork, hostNetwork.shim, []fault{shimKilled, shimAndDaemonKilled}},
		{run, lateInterfaces, lateInterfaces.run, all},
		{run, lateInterfaces, lateInterfaces.shim, []fault{shimKilled, shimAndDaemonKilled}},

		{stop, ownNetwork, stopping(ownNetwork), all},
		{stop, ownNetwork, release(ownNetwork), []fault{limitPassed}},
		{stop, userns, stopping(userns), []fault{fails, daemonKilled}},
		{stop, hostNetwork, stopping(hostNetwork), []fault{fails, daemonKilled}},
		{stopWithFailingDEL, ownNetwork, []string{"rename attachments"}, all},

		{remove, ownNetwork, slices.Concat(stopping(ownNetwork), removing()), all},
		{remove, userns, slices.Concat(stopping(userns), removing()), []fault{daemonKilled}},
		{removeStopped, ownNetwork, slices.Concat(removing()[:2], releaseAgain(), removing()[2:]), all},
		{removeStopped, hostNetwork, slices.Concat(removing()[:2], releaseAgain(), removing()[2:]), []fault{fails, daemonKilled}},

		{undo, ownNetwork, teardown(ownNetwork), all},
		{undo, userns, teardown(userns), []fault{fails, daemonKilled}},
		{undo, hostNetwork, teardown(hostNetwork), []fault{fails, daemonKilled}},

		{recovery, ownNetwork, teardown(ownNetwork), []fault{fails, daemonKilled}},
		{recovery, userns, teardown(userns), []fault{fails, daemonKilled}},
	}
}

// pod is a kind of pod: what it is, as the steps' lists ask for, the points that
// Run passes for it, in order, and those of them at which its shim waits.
type pod struct {
	name    string
	options []harness.PodOption
	is      []string
	run     []string
	shim    []string
}

var (
	ownNetwork = pod{
		name:    "own network",
		options: []harness.PodOption{harness.HostPort(8080, 80)},
		is:      []string{sandbox.OwnNetwork},
		run:     points("run", sandbox.OwnNetwork),
		shim:    []string{"pod/prepare after", "first ADD", "last ADD", "pod/addresses after", "pod/start before"},
	}
	userns = pod{
		name:    "user namespace",
		options: []harness.PodOption{harness.UserNamespace},
		is:      []string{sandbox.OwnNetwork, sandbox.OwnUsers},
		run:     points("run", sandbox.OwnNetwork, sandbox.OwnUsers),
		shim:    []string{"pod/prepare after", "pod/start before"},
	}
	hostNetwork = pod{
		name:    "host network",
		options: []harness.PodOption{harness.HostNetwork()},
		run:     points("run"),
		shim:    []string{"pod/prepare after", "pod/start before"},
	}
	// lateInterfaces is prepared after ADD, see needsInterfaces in package sandbox.
	lateInterfaces = pod{
		name:    "interface sysctl",
		options: []harness.PodOption{interfaceSysctl},
		is:      []string{sandbox.OwnNetwork},
		run:     from(points("run", sandbox.OwnNetwork), "pod/cni add before"),
		shim:    []string{"pod/prepare after", "pod/start before"},
	}
)

// starter are the points in the life of the process that makes pause where it is not
// launched: in a user namespace.
var starter = []string{"starter/asked", "starter/made", "starter/answered"}

// inside are the points that are passed within a step: where a record gets its
// name, and the plugins of the chain.
func inside(name step.Name, is []string) []string {
	own := slices.Contains(is, sandbox.OwnNetwork)
	switch {
	case name == "pod/record" && own:
		return []string{"rename sandboxes", "rename attachments"}
	case name == "pod/record":
		return []string{"rename sandboxes"}
	case name == "pod/start" || name == "pod/record stopped":
		return []string{"rename facts"}
	case name == "pod/cni add":
		return []string{"first ADD", "middle ADD", "last ADD"}
	case name == "pod/cni del" && own:
		return []string{"last DEL", "middle DEL", "first DEL"}
	}
	return nil
}

// points are those that an operation passes, in order, as package failpoint
// names them.
func points(operation string, is ...string) (all []string) {
	for _, name := range step.Names(sandbox.Steps(), operation, is...) {
		all = append(all, name.Before())
		all = append(all, inside(name, is)...)
		all = append(all, name.After())
	}
	return all
}

func from(points []string, first string) []string { return points[slices.Index(points, first):] }

func until(points []string, last string) []string { return points[:slices.Index(points, last)+1] }

// stopping are the points of Stop, removing those of Remove after it.
func stopping(p pod) []string { return points("stop", p.is...) }

func removing() []string { return points("remove") }

// teardown are the points at which destroy removes all of a pod.
func teardown(p pod) []string {
	return slices.Concat(release(p), from(removing(), "pod/remove files before"))
}

// release are the points at which Stop and destroy remove what the kernel and
// the network hold.
func release(p pod) []string {
	return until(from(stopping(p), "pod/end pause before"), "pod/unmount files after")
}

// releaseAgain is the same where all of it is gone.
func releaseAgain() []string { return release(pod{}) }

// withinLimit are those of a Run to which the daemon's own limit applies.
func withinLimit(run []string) []string { return from(run, "pod/record before") }

func interfaceSysctl(c *runtimeapi.PodSandboxConfig) {
	c.Linux.Sysctls = map[string]string{"net.ipv4.conf.all.rp_filter": "0"}
}

// TestMatrix runs all cases, those of one row one after the other on one node.
func TestMatrix(t *testing.T) {
	count := 0
	for _, r := range rows() {
		count += len(r.points) * len(r.faults)
		t.Run(fmt.Sprintf("%s/%s/%s", r.operation.name, r.pod.name, r.faults[0].name), r.test)
	}
	fmt.Printf("crash matrix: %d cases\n", count)
}

func (r row) test(t *testing.T) {
	var options []harness.Option
	if r.faults[0].name == limitPassed.name {
		options = append(options, shortLimits())
	}
	n := newNode(t, options...)
	w := n.runWitness(t)
	for _, point := range r.points {
		for _, f := range r.faults {
			t.Run(point+"/"+f.name, func(t *testing.T) {
				trial := trial{node: n, row: r, witness: w, point: point, fault: f}
				trial.test(t)
			})
		}
	}
	n.fillNetwork()
}
