package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

type pendingAttachment struct {
	Sandbox, Network, Error string
	Tries                   int
}

func pending(t *testing.T, n *harness.Node) []pendingAttachment {
	t.Helper()
	return harness.Info[[]pendingAttachment](t, n, "pendingAttachments")
}

func TestProperty12_DELThatFailsIsRepeated(t *testing.T) {
	n := newNode(t, harness.NoNetwork(), harness.Config(fast+"detach_tries = 100000\n"))
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"))
	id := n.RunPod(n.PodConfig("web"))
	pid := pausePID(t, n, id)
	r.order("one", "DEL", "fail 11 not now")
	for range 3 {
		err := stop(t, n, id)
		if err == nil || !strings.Contains(err.Error(), "not now") || !strings.Contains(err.Error(), "11") {
			t.Errorf("got %v", err)
		}
	}
	if ready(t, n, id) || alive(pid) {
		t.Error("the pod is ready though Stop has killed it")
	}
	if list := pending(t, n); len(list) != 1 || list[0].Sandbox != id || list[0].Tries < 3 || !strings.Contains(list[0].Error, "not now") {
		t.Errorf("the verbose status has %+v", list)
	}
	n.Kill()
	n.Start()
	if ready(t, n, id) {
		t.Error("ready after a restart")
	}
	if err := stop(t, n, id); err == nil {
		t.Error("no error after a restart")
	}
	r.order("one", "DEL", "")
	eventually(t, "the address is free in the background", patience, func() bool { return len(addresses(t, n)) == 0 })
	check(t, stop(t, n, id))
	if list := pending(t, n); len(list) != 0 {
		t.Errorf("still pending: %+v", list)
	}
}

func TestProperty13_DELThatNeverWorks(t *testing.T) {
	n := newNode(t, harness.NoNetwork(), harness.Config(fast+"detach_tries = 2\n"))
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.addressesOnly("one"))
	id := n.RunPod(n.PodConfig("web"))
	r.order("one", "DEL", "fail 999 broken")
	eventually(t, "Stop succeeds after some tries", patience, func() bool { return stop(t, n, id) == nil })
	check(t, remove(t, n, id))
	if pods := list(t, n, nil); len(pods) != 0 {
		t.Errorf("listed: %v", pods)
	}
	for range 2 {
		eventually(t, "the verbose status shows it", patience, func() bool {
			list := pending(t, n)
			return len(list) == 1 && list[0].Sandbox == id && list[0].Error != ""
		})
		if held := addresses(t, n); len(held) != 1 {
			t.Errorf("the address was forgotten: %v", held)
		}
		n.Kill()
		n.Start()
	}
	r.order("one", "DEL", "")
	eventually(t, "the address is free", patience, func() bool { return len(addresses(t, n)) == 0 && len(pending(t, n)) == 0 })
}

// broken are things that happen to the file of a network namespace.
func TestProperty17_NamespaceFileBrokenByHand(t *testing.T) {
	for name, harm := range map[string]func(t *testing.T, path string){
		"deleted": func(t *testing.T, path string) {
			check(t, unix.Unmount(path, unix.MNT_DETACH))
			check(t, os.Remove(path))
		},
		"unmounted": func(t *testing.T, path string) { check(t, unix.Unmount(path, unix.MNT_DETACH)) },
		"replaced": func(t *testing.T, path string) {
			check(t, unix.Unmount(path, unix.MNT_DETACH))
			check(t, os.Remove(path))
			check(t, os.WriteFile(path, []byte("a plain file"), 0o600))
		},
		"a directory": func(t *testing.T, path string) {
			check(t, unix.Unmount(path, unix.MNT_DETACH))
			check(t, os.Remove(path))
			check(t, os.Mkdir(path, 0o700))
			check(t, os.WriteFile(filepath.Join(path, "file"), nil, 0o600))
		},
	} {
		for _, restart := range []bool{false, true} {
			t.Run(name, func(t *testing.T) { stopWithout(t, harm, restart) })
		}
	}
}

func stopWithout(t *testing.T, harm func(*testing.T, string), restart bool) {
	n := newNode(t, harness.NoNetwork())
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.addressesOnly("one"))
	id := n.RunPod(n.PodConfig("web"))
	harm(t, verbose(t, n, id).NetNamespace)
	if restart {
		n.Kill()
		n.Start()
	}
	if network := podStatus(t, n, id).Network; network.GetIp() != "" || len(network.GetAdditionalIps()) != 0 {
		t.Errorf("status has the address of a network that is gone: %v", network)
	}
	check(t, stop(t, n, id))
	if calls := r.calls("DEL"); len(calls) != 1 || calls[0].Netns != "" {
		t.Errorf("want one DEL with an empty CNI_NETNS, got %+v", calls)
	}
	if held := addresses(t, n); len(held) != 0 {
		t.Errorf("addresses stay: %v", held)
	}
	check(t, remove(t, n, id))
}

// What a sandbox left that has no record any more is removed at the start,
// and GC is given the attachments that are valid.
func TestProperty22_GarbageCollection(t *testing.T) {
	n := newNode(t, harness.NoNetwork())
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"))
	kept, lost := n.RunPod(n.PodConfig("kept")), n.RunPod(n.PodConfig("lost"))
	pid := pausePID(t, n, lost)
	n.Kill()
	check(t, os.Remove(filepath.Join(n.Root, "sandboxes", lost+".json")))
	r.forget()
	n.Start()
	eventually(t, "the orphaned address is free", patience, func() bool { return len(addresses(t, n)) == 1 })
	eventually(t, "the orphaned pause process is gone", patience, func() bool { return !alive(pid) })
	if pods := list(t, n, nil); len(pods) != 1 || pods[0].Id != kept || !ready(t, n, kept) {
		t.Errorf("listed: %v", pods)
	}
	if calls := r.calls("DEL"); len(calls) != 1 || calls[0].Container != lost {
		t.Errorf("got %+v", calls)
	}
	eventually(t, "GC runs", patience, func() bool { return len(r.calls("GC")) > 0 })
	for _, call := range r.calls("GC") {
		if valid := validAttachments(t, call); !slices.Contains(valid, kept) {
			t.Errorf("GC was given %v as valid", valid)
		}
	}
}

func validAttachments(t *testing.T, call pluginCall) []string {
	t.Helper()
	var config struct {
		Valid []struct {
			ContainerID string `json:"containerID"`
		} `json:"cni.dev/valid-attachments"`
	}
	check(t, json.Unmarshal(call.Config, &config))
	var ids []string
	for _, attachment := range config.Valid {
		ids = append(ids, attachment.ContainerID)
	}
	return ids
}
