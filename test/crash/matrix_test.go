package crash

import (
	"fmt"
	"slices"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

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

// rows is the matrix.
func rows() []row {
	all := []fault{fails, daemonKilled, cancelled, deadlinePassed}
	return []row{
		{run, ownNetwork, ownNetwork.run, all},
		{run, ownNetwork, ownNetwork.shim, []fault{shimKilled, shimAndDaemonKilled}},
		{run, ownNetwork, []string{"prepare before"}, shimKilledInTime},
		{run, ownNetwork, withinLimit(ownNetwork.run), []fault{limitPassed}},
		{run, userns, userns.run, all},
		{run, userns, userns.shim, []fault{shimKilled, shimAndDaemonKilled}},
		{run, hostNetwork, hostNetwork.run, all},
		{run, hostNetwork, hostNetwork.shim, []fault{shimKilled, shimAndDaemonKilled}},
		{run, lateInterfaces, lateInterfaces.run, all},
		{run, lateInterfaces, lateInterfaces.shim, []fault{shimKilled, shimAndDaemonKilled}},

		{stop, ownNetwork, slices.Concat(release(ownNetwork), recordStopped), all},
		{stop, ownNetwork, release(ownNetwork), []fault{limitPassed}},
		{stop, userns, slices.Concat(release(userns), recordStopped), []fault{fails, daemonKilled}},
		{stop, hostNetwork, slices.Concat(release(hostNetwork), recordStopped), []fault{fails, daemonKilled}},
		{stopWithFailingDEL, ownNetwork, []string{"rename attachments"}, all},

		{remove, ownNetwork, slices.Concat(release(ownNetwork), recordStopped, removal), all},
		{remove, userns, slices.Concat(release(userns), recordStopped, removal), []fault{daemonKilled}},
		{removeStopped, ownNetwork, slices.Concat(releaseAgain, removal), all},
		{removeStopped, hostNetwork, slices.Concat(releaseAgain, removal), []fault{fails, daemonKilled}},

		{undo, ownNetwork, slices.Concat(release(ownNetwork), removal), all},
		{undo, userns, slices.Concat(release(userns), removal), []fault{fails, daemonKilled}},
		{undo, hostNetwork, slices.Concat(release(hostNetwork), removal), []fault{fails, daemonKilled}},

		{recovery, ownNetwork, slices.Concat(release(ownNetwork), removal), []fault{fails, daemonKilled}},
		{recovery, userns, slices.Concat(release(userns), removal), []fault{fails, daemonKilled}},
	}
}

// pod is a kind of pod, with the points that Run passes for it, in order, and
// those of them at which its shim waits.
type pod struct {
	name    string
	options []harness.PodOption
	run     []string
	shim    []string
}

var (
	ownNetwork = pod{
		name:    "own network",
		options: []harness.PodOption{harness.HostPort(8080, 80)},
		run:     slices.Concat(recorded, around("netns", "loopback", "prepare"), attached, around("addresses"), started),
		shim:    []string{"prepare after", "first ADD", "last ADD", "addresses after", "start before"},
	}
	userns = pod{
		name:    "user namespace",
		options: []harness.PodOption{userNamespace},
		run:     slices.Concat(recorded, around("userns", "netns", "loopback", "prepare"), attached, around("addresses"), started),
		shim:    []string{"prepare after", "start before"},
	}
	hostNetwork = pod{
		name:    "host network",
		options: []harness.PodOption{harness.HostNetwork()},
		run: slices.Concat([]string{"check before", "check after", "record before", "rename sandboxes", "record after", "sync before", "sync after"},
			around("files", "prepare"), started),
		shim: []string{"prepare after", "start before"},
	}
	// lateInterfaces is prepared after ADD, see needsInterfaces in package sandbox.
	lateInterfaces = pod{
		name:    "interface sysctl",
		options: []harness.PodOption{interfaceSysctl},
		run:     slices.Concat(attached, around("addresses", "prepare"), started),
		shim:    []string{"prepare after", "start before"},
	}
)

// The points in order, as package failpoint names them.
var (
	recorded = []string{
		"check before", "check after", "record before", "rename sandboxes", "rename attachments", "record after", "sync before", "sync after",
		"files before", "files after",
	}
	attached      = []string{"cni add before", "first ADD", "middle ADD", "last ADD", "cni add after"}
	started       = []string{"start before", "rename facts", "start after"}
	detached      = []string{"cni del before", "last DEL", "middle DEL", "first DEL", "cni del after"}
	recordStopped = []string{"record stopped before", "rename facts", "record stopped after"}
	releaseAgain  = around("end pause", "cni del", "remove netns", "remove userns")
	removal       = around("remove files", "remove record")
)

// release are the points at which destroy and Stop take back what the kernel
// and the network hold.
func release(p pod) []string {
	if p.name == hostNetwork.name {
		return releaseAgain
	}
	return slices.Concat(around("end pause"), detached, around("remove netns", "remove userns"))
}

// around are the points before and after steps.
func around(steps ...string) []string {
	var points []string
	for _, step := range steps {
		points = append(points, step+" before", step+" after")
	}
	return points
}

// withinLimit are those of a Run to which the daemon's own limit applies.
func withinLimit(run []string) []string { return run[2:] }

func userNamespace(c *runtimeapi.PodSandboxConfig) {
	mapping := []*runtimeapi.IDMapping{{ContainerId: 0, HostId: 200000, Length: 65536}}
	c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{
		Mode: runtimeapi.NamespaceMode_POD, Uids: mapping, Gids: mapping,
	}
}

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
