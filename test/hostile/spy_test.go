package hostile

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// What spies look for, by the letters of attacker.c.
const (
	everything = "rmufxe"
	ofOneUser  = "mug"
)

// secret is in the supervisor's environment, which is in its memory.
const secret = "/no/secret-of-the-node"

// newSpiedNode makes a node with a file of root's that is a mount, too, and says what a spy needs to know.
func newSpiedNode(t *testing.T) (n *nodetest.Node, args func(kinds string) []string) {
	n = newAttackedNode(t, nodetest.Env("PATH="+os.Getenv("PATH")+":"+secret))
	own := filepath.Join(n.Dir, "of-the-node")
	check(t, os.WriteFile(own, []byte("secret\n"), 0o600))
	check(t, unix.Mount(own, own, "", unix.MS_BIND, ""))
	t.Cleanup(func() { check(t, unix.Unmount(own, unix.MNT_DETACH)) })
	return n, func(kinds string) []string { return []string{"spy", n.Network, own, secret, kinds} }
}

// wantNoBreach makes execs until the spy has seen a twentieth of that many processes, and fails the test if
// it has seen of one of them what it should not have.
func (p *tenant) wantNoBreach(id, spy string, execs int) {
	p.t.Helper()
	seen, breaches := 0, make(map[string]int)
	for seen < execs/20 && len(breaches) == 0 { // a busy machine lets a spy see few
		p.execs(id, execs, 10, 2, false)
		seen, breaches = p.sightings(spy)
	}
	p.t.Logf("the spy has looked at %d processes", seen)
	for what, times := range breaches {
		p.t.Errorf("seen of the node, %d times: %s", times, map[string]string{
			"r": "its files, by /proc/PID/root", "m": "its mounts, by /proc/PID/mountinfo", "u": "its sockets, by /proc/PID/net/unix",
			"f": "what the supervisor has open, by /proc/PID/fd", "x": "a program of its own, to be written to, by /proc/PID/exe",
			"e": "the supervisor's memory, by /proc/PID/mem and environ", "g": "cgroups outside the container's, by /proc/PID/cgroup",
		}[what])
	}
}

// sightings counts what a spy says in its log.
func (p *tenant) sightings(spy string) (seen int, breaches map[string]int) {
	breaches = make(map[string]int)
	for line := range strings.Lines(p.log(spy)) {
		if strings.Contains(line, " seen ") {
			seen++
		}
		if _, what, is := strings.Cut(line, " breach "); is {
			breaches[strings.TrimSpace(what)]++
		}
	}
	return seen, breaches
}

// attack: information leaks: a debug container (TARGET, as of kubectl debug --target) with SYS_PTRACE reads root, fd, mem, environ, exe, mountinfo and net/unix of each new process during 200 execs
// held: it finds no file, mount or socket of the node, and no descriptor or memory of the supervisor
// field: runc: /proc/PID/root is the root of the container, too
func TestADebuggerSeesNothingOfTheNode(t *testing.T) {
	n, args := newSpiedNode(t)
	p := newTenant(t, n, "debugged")
	for _, profile := range profiles {
		app := p.run("app-"+profile.String(), powerless(profile))
		spy := "spy-" + profile.String()
		p.run(spy, ofAttacker(args(everything)...), pidNamespace(runtimeapi.NamespaceMode_TARGET, app), func(c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_PTRACE"}}
		})
		p.wantNoBreach(app, spy, 200)
	}
}

// attack: information leaks: a user in a container, without capabilities and with no_new_privs, reads mountinfo, cgroup and net/unix of each new process during 200 execs
// held: it finds no mount, cgroup or socket of the node
// field: execs of runc show no mount and no socket either; on cgroup v1 they show the cgroup of their creator
func TestAUserSeesNothingOfTheNode(t *testing.T) {
	n, args := newSpiedNode(t)
	p := newTenant(t, n, "used")
	for _, profile := range profiles {
		spy := "spy-" + profile.String()
		id := p.run(spy, ofAttacker(args(ofOneUser)...), powerless(profile), func(c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext.RunAsUser = &runtimeapi.Int64Value{Value: 1000}
			c.Linux.SecurityContext.NoNewPrivs = true
		})
		p.wantNoBreach(id, spy, 200)
	}
}

// descriptorsOf are what a process has open, by number; none, once it has ended.
func descriptorsOf(pid int) map[string]string {
	all := make(map[string]string)
	links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil {
			all[filepath.Base(link)] = to
		}
	}
	return all
}

func deviceOf(t *testing.T, path string) uint64 {
	var stat unix.Stat_t
	check(t, unix.Stat(path, &stat))
	return stat.Dev
}

// awaitSleep waits until a process runs sleep with the argument.
func awaitSleep(t testing.TB, argument string) (pid int) {
	harness.Eventually(t, "sleep "+argument+" runs", func() bool {
		for _, p := range harness.Processes() {
			if len(p.Args) > 1 && p.Args[0] == "sleep" && p.Args[1] == argument {
				pid = p.PID
			}
		}
		return pid != 0
	})
	return pid
}

// attack: information leaks: processes of a container and of an exec list their descriptors
// held: they find their three streams, none of them on a file system that has files of the node or of other pods
func TestContainersHaveTheirStreamsOnly(t *testing.T) {
	p := newTenant(t, newAttackedNode(t), "streams")
	p.run("other") // whose streams, log and record the supervisor has open, too
	for _, profile := range profiles {
		id := p.run("app-"+profile.String(), powerless(profile), command("sleep", "7774"))
		go func() { _, _ = p.exec(id, 5, "sleep", "7773") }() // at its limit
		for _, argument := range []string{"7774", "7773"} {
			open := descriptorsOf(awaitSleep(t, argument))
			harness.Want(t, len(open) == 3 && open["0"] != "" && open["1"] != "" && open["2"] != "",
				"sleep %s has %v, want its three streams", argument, open)
			for _, to := range open {
				harness.Want(t, !strings.HasPrefix(to, "/") || deviceOf(t, to) != deviceOf(t, p.Dir),
					"sleep %s has %s, by which open_by_handle_at(2) reaches the node's files", argument, to)
			}
		}
		check(t, p.stop(id))
	}
}

// A starter that waits has its own descriptors alone. One that works has those of its request, too, and what
// it has opened itself: while a hook of its container hangs.
//
// attack: information leaks: a hook hangs, and the process that creates the container keeps its descriptors meanwhile
// held: it has three for its output, its socket, the container's streams and the descriptors of libcontainer; no lock, socket, log or spool of the supervisor
func TestStartersHaveTheirOwnDescriptorsOnly(t *testing.T) {
	p := newTenant(t, newAttackedNode(t), "starters")
	p.run("other") // whose streams, log and record the supervisor has open
	starters := func(working bool) (pids []int) {
		all := harness.Processes()
		for _, one := range all {
			busy := slices.ContainsFunc(all, func(p harness.Process) bool { return p.Parent == one.PID })
			if len(one.Args) > 1 && strings.HasSuffix(one.Args[0], "minicri-shim") && one.Args[1] == "start" && busy == working {
				pids = append(pids, one.PID)
			}
		}
		return pids
	}
	own := []string{"/dev/null", "/dev/null", "/dev/null", "anon_inode:[eventfd]", "anon_inode:[eventpoll]", "socket:"}
	harness.Eventually(t, fmt.Sprintf("a starter waits with %v", own), func() bool {
		return slices.ContainsFunc(starters(false), func(pid int) bool { return slices.Equal(kindsOf(descriptorsOf(pid)), own) })
	})
	before := fifosOf(t, p.Node)
	made := make(chan error, 1)
	go func() {
		id, err := p.create("hangs", hookThatHangs(t))
		if err == nil {
			err = p.start(id) // which says why it could not be made
		}
		made <- err
	}()
	awaitSleep(t, "7772") // the hook
	request := slices.DeleteFunc(fifosOf(t, p.Node), func(fifo string) bool { return slices.Contains(before, fifo) })
	harness.Need(t, len(request) == 2, "the new container has the streams %v, want two", request)
	working := starters(true)
	harness.Need(t, len(working) != 0, "no starter has a child: this shows nothing")
	for _, pid := range working {
		p.wantNothingShared(pid, request)
	}
	harness.WantError(t, <-made) // its hook hangs
}

// kindsOf are what descriptors are, sorted, without the numbers of sockets.
func kindsOf(open map[string]string) (kinds []string) {
	for _, to := range open {
		if strings.HasPrefix(to, "socket:") {
			to = "socket:"
		}
		kinds = append(kinds, to)
	}
	slices.Sort(kinds)
	return kinds
}

// fifosOf are the outputs of the node's containers.
func fifosOf(t *testing.T, n *nodetest.Node) []string {
	return harness.Glob(t, n.Dir, "state", "sandboxes", "*", "*.std???")
}

// wantNothingShared fails the test unless a starter has the outputs of its request once each, and beside them
// no file of the node, no pipe and no socket that the supervisor has, too.
func (p *tenant) wantNothingShared(pid int, request []string) {
	p.t.Helper()
	theirs := make(map[string]bool)
	for _, supervisor := range p.Supervisors() {
		for _, to := range descriptorsOf(supervisor) {
			theirs[to] = true
		}
	}
	var given []string
	for number, to := range descriptorsOf(pid) {
		switch {
		case slices.Contains(request, to):
			given = append(given, to)
		case theirs[to] && (strings.HasPrefix(to, "socket:") || strings.HasPrefix(to, "pipe:") || strings.Contains(to, p.Network)):
			p.t.Errorf("starter %d has %s open as %s, which is no part of its request", pid, to, number)
		}
	}
	slices.Sort(given)
	harness.Want(p.t, slices.Equal(given, request), "starter %d has %v of its request, want %v", pid, given, request)
}

// hookThatHangs is a container with a hook of the node that does not end in time.
func hookThatHangs(t testing.TB) change {
	device := nodetest.CDIDevice(t, nodetest.Hook{Kind: "createRuntime", Script: "exec sleep 7772", Seconds: 5})
	return func(c *runtimeapi.ContainerConfig) { c.CDIDevices = []*runtimeapi.CDIDevice{{Name: device}} }
}
