// Package cases lists the cases of the crash matrix: operations on kinds of pods, the points that each passes, and what
// happens there. Package sandbox runs all of them in memory, package crash runs them on the kernel.
package cases

import (
	"fmt"
	"slices"
	"strings"

	"github.com/minicri/minicri/internal/step"
)

// Row is a part of the matrix: an operation on a kind of pod, each of its points with each of the faults.
type Row struct {
	Operation string
	Pod       Pod
	Points    []string
	Faults    []string
}

// Name names the row.
func (r Row) Name() string { return fmt.Sprintf("%s/%s/%s", r.Operation, r.Pod.Name, r.Faults[0]) }

// Operations. Undo is a Run that fails at its end, Recovery the start of a daemon after one that was killed in Run.
const (
	Run                = "run"
	Stop               = "stop"
	StopWithFailingDEL = "stop with failing DEL"
	Remove             = "remove"
	RemoveStopped      = "remove stopped"
	Undo               = "undo"
	Recovery           = "recovery"
)

// Faults.
const (
	Error               = "error"
	DaemonKilled        = "daemon killed"
	ShimKilled          = "shim killed"
	ShimKilledAtWork    = "shim killed while it makes pause"
	ShimAndDaemonKilled = "shim and daemon killed"
	StarterKilled       = "starter killed"
	StartedTwice        = "daemon killed, second start"
	Terminated          = "SIGTERM"
	CutOff              = "SIGTERM and its limit"
	Cancelled           = "cancelled"
	DeadlinePassed      = "deadline passed"
	LimitPassed         = "limit passed"
	Reboot              = "reboot"
	RebootTwice         = "reboot, second start"
)

// Timed are the faults in which a deadline or a limit passes. They are in memory alone, where time passes at once: on
// the kernel a context that ends is a call that is cancelled.
var Timed = []string{DeadlinePassed, LimitPassed}

// All is the matrix.
func All() []Row {
	all := []string{Error, DaemonKilled, Cancelled, DeadlinePassed}
	ending := []string{StartedTwice, Terminated}
	killed := []string{Error, DaemonKilled}
	shims := []string{ShimKilled, ShimAndDaemonKilled}
	rebooted := []string{Reboot, RebootTwice}
	return []Row{
		{Run, OwnNetwork, OwnNetwork.run, ending},
		{Run, OwnNetwork, adds, []string{CutOff}},
		{Stop, OwnNetwork, stopping(OwnNetwork), ending},
		{Remove, OwnNetwork, removing(), ending},
		{Undo, OwnNetwork, teardown(OwnNetwork), ending},
		{Recovery, OwnNetwork, teardown(OwnNetwork), []string{StartedTwice}},

		{Run, OwnNetwork, OwnNetwork.run, all},
		{Run, OwnNetwork, OwnNetwork.shim, shims},
		{Run, OwnNetwork, []string{"pod/prepare before"}, []string{ShimKilledAtWork}},
		{Run, OwnNetwork, from(OwnNetwork.run, "pod/record before"), []string{LimitPassed}},
		{Run, Userns, Userns.run, all},
		{Run, Userns, Userns.shim, shims},
		{Run, Userns, starter, []string{StarterKilled, DaemonKilled, ShimKilled, ShimAndDaemonKilled}},
		{Run, HostNetwork, HostNetwork.run, all},
		{Run, HostNetwork, HostNetwork.shim, shims},
		{Run, LateInterfaces, LateInterfaces.run, all},
		{Run, LateInterfaces, LateInterfaces.shim, shims},

		{Stop, OwnNetwork, stopping(OwnNetwork), all},
		{Stop, OwnNetwork, release(OwnNetwork), []string{LimitPassed}},
		{Stop, Userns, stopping(Userns), killed},
		{Stop, HostNetwork, stopping(HostNetwork), killed},
		{StopWithFailingDEL, OwnNetwork, []string{"rename attachments"}, all},

		{Remove, OwnNetwork, slices.Concat(stopping(OwnNetwork), removing()), all},
		{Remove, Userns, slices.Concat(stopping(Userns), removing()), []string{DaemonKilled}},
		{RemoveStopped, OwnNetwork, removingStopped(), all},
		{RemoveStopped, HostNetwork, removingStopped(), killed},

		{Undo, OwnNetwork, teardown(OwnNetwork), all},
		{Undo, Userns, teardown(Userns), killed},
		{Undo, HostNetwork, teardown(HostNetwork), killed},

		{Recovery, OwnNetwork, teardown(OwnNetwork), killed},
		{Recovery, Userns, teardown(Userns), killed},

		{Run, OwnNetwork, OwnNetwork.run, rebooted},
		{Run, Userns, Userns.run, rebooted},
		{Stop, OwnNetwork, stopping(OwnNetwork), rebooted},
		{RemoveStopped, OwnNetwork, removingStopped(), rebooted},
	}
}

// Each has one case for each step: the daemon is killed after it.
func Each() []Row {
	after := func(all []string) []string {
		return slices.DeleteFunc(slices.Clone(all), func(point string) bool { return !strings.HasSuffix(point, " after") })
	}
	killed := []string{DaemonKilled}
	return []Row{
		{Run, Userns, after(Userns.run), killed},
		{Stop, OwnNetwork, after(stopping(OwnNetwork)), killed},
		{RemoveStopped, OwnNetwork, after(removing()), killed},
		{Run, Userns, starter[1:2], []string{StarterKilled, ShimKilled}},
		{Run, OwnNetwork, adds[2:], []string{CutOff}},
	}
}

// Pod is a kind of pod: its properties, the points that Run passes for it, in order, and the points at which its shim
// waits.
type Pod struct {
	Name string
	is   []string
	run  []string
	shim []string
}

// Properties of pods.
const (
	inNetwork = "own network"
	inUsers   = "user namespace"
)

// Steps are the steps of a pod's life, by operation, in order (package sandbox).
var Steps = map[string][]step.Name{
	"run": {
		"pod/check", "pod/reserve", "pod/record", "pod/sync", "pod/files", "pod/userns", "pod/netns", "pod/loopback",
		"pod/prepare", "pod/cni add", "pod/addresses", "pod/nri run", "pod/start",
	},
	"update": {"pod/nri update", "pod/nri updated"},
	"stop": {
		"pod/stop containers", "pod/nri stop", "pod/end pause", "pod/cni del", "pod/remove netns", "pod/remove userns",
		"pod/unmount files", "pod/record stopped",
	},
	"remove": {"pod/remove containers", "pod/nri remove", "pod/remove files", "pod/remove record"},
}

// isOf reports whether a pod on a node without NRI has the step.
func isOf(name step.Name, is []string) bool {
	switch name {
	case "pod/userns":
		return slices.Contains(is, inUsers)
	case "pod/netns", "pod/loopback", "pod/cni add", "pod/addresses":
		return slices.Contains(is, inNetwork)
	}
	return !strings.HasPrefix(name.Own(), "nri ")
}

// The kinds of pods. LateInterfaces has a sysctl of an interface: its pause is prepared after ADD.
var (
	OwnNetwork = Pod{
		Name: "own network", is: []string{inNetwork}, run: points("run", inNetwork),
		shim: []string{"pod/prepare after", "first ADD", "last ADD", "pod/addresses after", "pod/start before"},
	}
	Userns         = Pod{"user namespace", []string{inNetwork, inUsers}, points("run", inNetwork, inUsers), prepared}
	HostNetwork    = Pod{"host network", nil, points("run"), prepared}
	LateInterfaces = Pod{"interface sysctl", []string{inNetwork}, from(points("run", inNetwork), "pod/cni add before"), prepared}
)

var (
	prepared = []string{"pod/prepare after", "pod/start before"}
	// starter are the points of the process that makes pause where it is not launched: in a user namespace.
	starter = []string{"starter/asked", "starter/made", "starter/answered"}
	adds    = []string{"first ADD", "middle ADD", "last ADD"}
)

// inside are the points that are passed within a step: where a record gets its name, and the plugins of the chain.
func inside(name step.Name, is []string) []string {
	switch {
	case name == "pod/record":
		return []string{"rename sandboxes"}
	case name == "pod/start" || name == "pod/record stopped":
		return []string{"rename facts"}
	case name == "pod/cni add":
		return append([]string{"rename attachments"}, adds...)
	case name == "pod/cni del" && slices.Contains(is, inNetwork):
		return []string{"last DEL", "middle DEL", "first DEL"}
	}
	return nil
}

// points are the points that an operation passes, in order, as package failpoint names them.
func points(operation string, is ...string) (all []string) {
	for _, name := range Steps[operation] {
		if !isOf(name, is) {
			continue
		}
		all = append(all, name.Before())
		all = append(all, inside(name, is)...)
		all = append(all, name.After())
	}
	return all
}

func from(points []string, first string) []string { return points[slices.Index(points, first):] }
func until(points []string, last string) []string { return points[:slices.Index(points, last)+1] }

// stopping are the points of Stop, removing the points of Remove after it.
func stopping(p Pod) []string { return points("stop", p.is...) }
func removing() []string      { return points("remove") }

// removingStopped are the points of Remove after Stop. Remove releases everything once more.
func removingStopped() []string {
	return slices.Concat(removing()[:2], release(Pod{}), removing()[2:])
}

// teardown are the points at which destroy removes all of a pod.
func teardown(p Pod) []string {
	return slices.Concat(release(p), from(removing(), "pod/remove files before"))
}

// release are the points at which Stop and destroy remove processes, namespaces, mounts and the attachment.
func release(p Pod) []string {
	return until(from(stopping(p), "pod/end pause before"), "pod/unmount files after")
}
