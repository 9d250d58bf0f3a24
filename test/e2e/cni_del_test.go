package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

type pendingAttachment struct {
	Sandbox, Network, Error string
	Tries                   int
}

func pending(t *testing.T, n *nodetest.Node) []pendingAttachment {
	return nodetest.Info[[]pendingAttachment](t, n, "pendingAttachments")
}

func TestProperty12_DELThatFailsIsRepeated(t *testing.T) {
	n, r := newRecorded(t, fast+"detach_tries = 100000\ngive_up_tries = 3\n")
	id := n.RunPod(n.PodConfig("web"))
	pid := pausePID(t, n, id)
	// Somebody empties libcni's cache, and a daemon starts: ADD has succeeded all the same.
	check(t, os.Remove(filepath.Join(libcni.CacheDir, "results", n.Network+"-"+id+"-eth0")))
	n.Crash()
	r.order("one", "DEL", "fail 11 not now")
	for range 3 {
		harness.WantError(t, stop(t, n, id), "not now", "11")
	}
	harness.Want(t, !ready(t, n, id) && !alive(pid), "the pod is ready though Stop has killed it")
	if list := pending(t, n); len(list) != 1 || list[0].Sandbox != id || list[0].Tries < 3 || !strings.Contains(list[0].Error, "not now") {
		t.Errorf("the verbose status has %+v", list)
	}
	n.Crash()
	harness.Want(t, !ready(t, n, id), "ready after a restart")
	timeline, err := n.RunCommand("timeline", id)
	harness.Need(t, err == nil, "Stop has ended pause: %v\n%s", err, timeline)
	harness.Want(t, strings.Contains(timeline, "failed at cni del"), "Stop has ended pause: %v\n%s", err, timeline)
	harness.Want(t, !strings.Contains(timeline, "by itself"), "Stop has ended pause: %v\n%s", err, timeline)
	harness.WantError(t, stop(t, n, id)) // after a restart
	rows := len(verbose(t, n, id).Timeline)
	r.order("one", "DEL", "")
	harness.Eventually(t, "the address is free in the background", func() bool { return len(addresses(t, n)) == 0 })
	harness.Eventually(t, "the pod's timeline says so", func() bool { return len(verbose(t, n, id).Timeline) > rows })
	check(t, stop(t, n, id))
	harness.Same(t, "pending", len(pending(t, n)), 0)
}

func TestProperty17_NamespaceFileBrokenByHand(t *testing.T) {
	removed := func(path string) error { return errors.Join(unix.Unmount(path, unix.MNT_DETACH), os.Remove(path)) }
	for name, harm := range harness.Sorted(map[string]func(path string) error{
		"deleted":   removed,
		"unmounted": func(path string) error { return unix.Unmount(path, unix.MNT_DETACH) },
		"replaced": func(path string) error {
			return errors.Join(removed(path), os.WriteFile(path, []byte("a plain file"), 0o600))
		},
		"a directory": func(path string) error {
			return errors.Join(removed(path), os.Mkdir(path, 0o700), os.WriteFile(filepath.Join(path, "file"), nil, 0o600))
		},
	}) {
		for _, restart := range []bool{false, true} {
			t.Run(name, func(t *testing.T) { stopWithout(t, harm, restart) })
		}
	}
}

func stopWithout(t *testing.T, harm func(string) error, restart bool) {
	n, r := newRecorded(t, "")
	id := n.RunPod(n.PodConfig("web"))
	check(t, harm(verbose(t, n, id).NetNamespace))
	found, _ := problems(t, n)
	wantFound(t, found, "sandbox", id[:12]+") has lost its network namespace")
	if restart {
		n.Crash()
	}
	network := podStatus(t, n, id).Network
	harness.Want(t, network.GetIp() == "" && len(network.GetAdditionalIps()) == 0, "status has the address of a network that is gone: %v", network)
	check(t, stop(t, n, id))
	calls := r.calls("DEL")
	harness.Want(t, len(calls) == 1 && calls[0].Netns == "", "want one DEL with an empty CNI_NETNS, got %+v", calls)
	wantAddresses(t, n, 0)
	check(t, remove(t, n, id))
}

// A person gives up what waits for a DEL that never succeeds, with and without a daemon, and nothing else.
func TestCheckGivesUpAnAttachment(t *testing.T) {
	n, r := newRecorded(t, fast+"detach_tries = 1\n", "two")
	id, other := n.RunPod(n.PodConfig("web")), n.RunPod(n.PodConfig("other"))
	r.order("two", "DEL", "fail 11 never")
	n.RemovePod(id)
	found, clean := problems(t, n, "--fix", "--force")
	harness.Want(t, !clean, "problems: %+v", found)
	harness.Want(t, len(found) == 1, "problems: %+v", found)
	harness.Want(t, slices.Equal(found[0].IDs, []string{id}), "problems: %+v", found)
	said := found[0].Message + found[0].Advice
	harness.Want(t, strings.Contains(said, "/web ("+id[:12]+")") && !strings.Contains(said, "force"), "it says %q", said)
	found, _ = problems(t, n, "--fix", "--force", id[:12])
	wantFound(t, found, "attachment", id[:12]+`" cannot be given up`)
	wantClean(t, n, "--fix", "--force", id)
	harness.Eventually(t, "the daemon gives it up too", func() bool {
		return len(pending(t, n)) == 0 && strings.Contains(n.Log(), "given up by hand")
	})
	n.RemovePod(other)
	n.Stop()
	record := filepath.Join(n.Root, "sandboxes", "quarantine", "another.json")
	check(t, os.MkdirAll(filepath.Dir(record), 0o700))
	check(t, os.WriteFile(record, []byte("nonsense"), 0o600))
	found, _ = problems(t, n, "--fix", "--force", other)
	harness.Want(t, len(found) == 1 && strings.Contains(found[0].Message, record), "problems: %+v", found)
	wantClean(t, n, "--fix", "--force", "another")
	n.Start()
	r.order("two", "DEL", "")
}

// What a daemon is about to do is no problem.
func TestCheckBesidePodsThatComeAndGo(t *testing.T) {
	n := newNode(t)
	over, end := context.WithCancel(t.Context())
	var pods sync.WaitGroup
	for worker := range 3 {
		pods.Go(func() {
			for i := 0; over.Err() == nil; i++ {
				n.RemovePod(n.RunPod(n.PodConfig(fmt.Sprint("web-", worker, "-", i))))
			}
		})
	}
	for range 8 {
		wantClean(t, n)
	}
	end()
	pods.Wait()
}

// A root may be behind a symlink, as operators have it on another disk. A daemon whose pods cannot be executed does
// not start, and says by which key; one that cannot make a pause is not ready, and is once it can.
//
// cri: RuntimeCondition.reason
func TestNodeThatCannotMakeAPause(t *testing.T) {
	n := newNode(t)
	n.Kill()
	check(t, os.Rename(n.Root, n.Root+"-real"))
	check(t, os.Symlink(n.Root+"-real", n.Root))
	n.Start()
	n.RemovePod(n.RunPod(n.PodConfig("web")))
	n.Stop()
	check(t, os.Remove(n.Root))
	check(t, os.Rename(n.Root+"-real", n.Root))
	check(t, unix.Mount("noexec", n.Root, "tmpfs", unix.MS_NOEXEC, "size=64m"))
	output, err := n.RunDaemon()
	check(t, unix.Unmount(n.Root, 0))
	harness.Need(t, err != nil, "on a noexec mount: %v, %s", err, output)
	harness.Want(t, strings.Contains(output, "root: "), "on a noexec mount: %v, %s", err, output)
	harness.Want(t, strings.Contains(output, "noexec"), "on a noexec mount: %v, %s", err, output)
	check(t, unix.Mount("none", n.Netns, "tmpfs", unix.MS_RDONLY, ""))
	n.Start()
	harness.Eventually(t, "the node says that it is not ready, and why", func() bool {
		is, message := condition(t, n, runtimeapi.RuntimeReady)
		return !is && strings.Contains(message, "a pause did not start") && strings.Contains(message, "netns_dir")
	})
	c := nodetest.Call(t, n.Runtime.Status, &runtimeapi.StatusRequest{}).Status.Conditions[0]
	harness.Want(t, c.Type == runtimeapi.RuntimeReady && c.Reason != "", "the condition has no reason: %v", c)
	check(t, unix.Unmount(n.Netns, unix.MNT_DETACH))
	harness.Eventually(t, "the node is ready", func() bool { is, _ := condition(t, n, runtimeapi.RuntimeReady); return is })
	n.RemovePod(n.RunPod(n.PodConfig("web")))
}

func becomesReady(t *testing.T, n *nodetest.Node, want bool) {
	harness.Eventually(t, "NetworkReady follows", func() bool {
		got, _ := networkReady(t, n)
		return got == want
	})
}

// Files come by rename, half written at first, and go with their directory, also over a start; bad ones hide
// no good one.
//
// cri: RuntimeCondition.message Status StatusRequest.verbose
func TestProperty20_FilesThatComeAndGo(t *testing.T) {
	n := newNode(t, nodetest.NoNetwork())
	becomesReady(t, n, false)
	path := n.WriteNetwork()
	becomesReady(t, n, true)
	whole := string(harness.Read(t, path))
	check(t, os.Rename(path, path+".off"))
	becomesReady(t, n, false)
	check(t, os.WriteFile(path, []byte(whole[:len(whole)/2]), 0o644))
	harness.Eventually(t, "the message names the file", func() bool {
		ready, message := networkReady(t, n)
		return !ready && strings.Contains(message, path)
	})
	check(t, os.Rename(path+".off", path))
	becomesReady(t, n, true)
	for _, restart := range []func(){func() {}, n.Restart} {
		check(t, os.RemoveAll(n.CNIConf))
		restart()
		becomesReady(t, n, false)
		check(t, os.Mkdir(n.CNIConf, 0o755))
		n.WriteNetwork()
		becomesReady(t, n, true)
	}
	bad := filepath.Join(n.CNIConf, "00-bad.conflist")
	check(t, os.WriteFile(bad, []byte(`{"name": `), 0o644))
	check(t, os.WriteFile(filepath.Join(n.CNIConf, "01-empty.conf"), nil, 0o644))
	check(t, os.WriteFile(filepath.Join(n.CNIConf, "02-no-plugins.conflist"), []byte(`{"cniVersion": "1.0.0", "name": "x", "plugins": []}`), 0o644))
	harness.Eventually(t, "the bad files are seen", func() bool {
		problems := nodetest.Info[[]string](t, n, "networkProblems")
		return len(problems) == 3 && strings.Contains(problems[0], bad)
	})
	n.RunPod(n.PodConfig("web"))
}
