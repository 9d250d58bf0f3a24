package e2e

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

func TestProperty11_ChainThatFailsInTheMiddle(t *testing.T) {
	n := newNode(t, harness.NoNetwork())
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"), r.plugin("two", nil), r.plugin("three", nil))
	r.order("two", "ADD", "fail 42 no more cheese")
	_, err := run(t, n, n.PodConfig("web"))
	if err == nil {
		t.Fatal("no error")
	}
	for _, part := range []string{"plugin two", "ADD", "42", "no more cheese"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error lacks %s: %v", part, err)
		}
	}
	if got := sequence(r.calls("")); got != "ADD one, ADD two, DEL three, DEL two, DEL one" {
		t.Errorf("got %s", got)
	}
	for _, call := range r.calls("DEL") {
		first := r.calls("ADD")[0]
		if call.Container != first.Container || call.Netns != first.Netns || !slices.Equal(sortedArgs(call.Args), sortedArgs(first.Args)) {
			t.Errorf("DEL was called with %+v, ADD with %+v", call, first)
		}
	}
	if held := addresses(t, n); len(held) != 0 {
		t.Errorf("addresses stay: %v", held)
	}
	if pods := list(t, n, nil); len(pods) != 0 {
		t.Errorf("listed: %v", pods)
	}
	r.order("two", "ADD", "")
	n.RunPod(n.PodConfig("web"))
}

func TestProperty11_ChainThatFailsInTheMiddleAndWithDEL(t *testing.T) {
	n := newNode(t, harness.NoNetwork(), harness.Config(fast))
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.addressesOnly("one"), r.plugin("two", nil))
	r.order("two", "ADD", "fail 42 no")
	r.order("two", "DEL", "fail 43 not now")
	if _, err := run(t, n, n.PodConfig("web")); err == nil {
		t.Fatal("no error")
	}
	// The plugin that fails does not keep the other one from its DEL, and is
	// asked until it succeeds.
	if held := addresses(t, n); len(held) != 0 {
		t.Errorf("addresses stay: %v", held)
	}
	pending := func() bool { return strings.Contains(statusInfo(t, n)["pendingAttachments"], "not now") }
	eventually(t, "the attachment is pending", patience, pending)
	r.order("two", "ADD", "")
	// The name is not blocked by what is being released.
	n.RunPod(n.PodConfig("web"))
	r.order("two", "DEL", "")
	eventually(t, "the attachment is released", patience, func() bool { return !pending() })
	if held := addresses(t, n); len(held) != 1 {
		t.Errorf("one pod has the addresses %v", held)
	}
}

func TestAddressIsNeeded(t *testing.T) {
	n := newNode(t, harness.NoNetwork())
	r := newRecorder(t, n)
	bridge := r.bridge("one")
	bridge["ipam"], bridge["isGateway"], bridge["ipMasq"] = harness.Object{}, false, false
	n.WriteConflist("10-test.conflist", bridge)
	_, err := run(t, n, n.PodConfig("web"))
	if err == nil || !strings.Contains(err.Error(), "address") {
		t.Errorf("got %v", err)
	}
	if got := sequence(r.calls("")); got != "ADD one, DEL one" {
		t.Errorf("got %s", got)
	}
}

// change does something to the configuration that DEL has to be independent of.
func TestProperty19_DELHasTheConfigurationOfADD(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, n *harness.Node, file string){
		"other network": func(t *testing.T, _ *harness.Node, file string) {
			check(t, os.WriteFile(file, []byte(`{"cniVersion": "1.1.0", "name": "other", "plugins": [{"type": "loopback"}]}`), 0o644))
		},
		"plugin gone": func(_ *testing.T, n *harness.Node, _ string) { n.WriteConflist("10-test.conflist", n.BridgePlugin()) },
		"broken":      func(t *testing.T, _ *harness.Node, file string) { check(t, os.WriteFile(file, []byte("{"), 0o644)) },
		"file gone":   func(t *testing.T, _ *harness.Node, file string) { check(t, os.Remove(file)) },
		"directory gone": func(t *testing.T, n *harness.Node, _ string) {
			check(t, os.RemoveAll(n.CNIConf))
		},
	} {
		for _, restart := range []bool{false, true} {
			t.Run(name, func(t *testing.T) { detachAfter(t, change, restart) })
		}
	}
}

func detachAfter(t *testing.T, change func(*testing.T, *harness.Node, string), restart bool) {
	n := newNode(t, harness.NoNetwork(), harness.Config(fast))
	r := newRecorder(t, n)
	file := n.WriteConflist("10-test.conflist", r.bridge("one"), r.plugin("two", harness.Object{"capabilities": capabilities}))
	id := n.RunPod(n.PodConfig("web", harness.HostPort(8080, 80)))
	before := currentNetwork(t, n)
	change(t, n, file)
	eventually(t, "the daemon sees the change", patience, func() bool {
		return currentNetwork(t, n) != before || strings.Contains(statusInfo(t, n)["networkProblems"], file)
	})
	if restart {
		n.Kill()
		n.Start()
	}
	check(t, stop(t, n, id))
	add, del := r.calls("ADD"), r.calls("DEL")
	if sequence(del) != "DEL two, DEL one" {
		t.Fatalf("got %s", sequence(r.calls("")))
	}
	for i, call := range del {
		first := add[len(add)-1-i]
		if !slices.Equal(sortedArgs(call.Args), sortedArgs(first.Args)) || call.Netns != first.Netns || call.Interface != first.Interface {
			t.Errorf("DEL was called with %+v, ADD with %+v", call, first)
		}
		if !sameJSON(t, withoutResult(t, call.Config), withoutResult(t, first.Config)) {
			t.Errorf("the configuration of DEL is %s, that of ADD %s", call.Config, first.Config)
		}
	}
	if held := addresses(t, n); len(held) != 0 {
		t.Errorf("addresses stay: %v", held)
	}
	check(t, os.MkdirAll(n.CNIConf, 0o755))
}

// currentNetwork is the configuration in effect, "" if there is none.
func currentNetwork(t *testing.T, n *harness.Node) string {
	t.Helper()
	return statusInfo(t, n)["cniconfig"]
}

func statusInfo(t *testing.T, n *harness.Node) map[string]string {
	t.Helper()
	answer, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{Verbose: true})
	check(t, err)
	return answer.Info
}

// withoutResult drops prevResult, which the chain adds.
func withoutResult(t *testing.T, config json.RawMessage) json.RawMessage {
	t.Helper()
	var object map[string]json.RawMessage
	check(t, json.Unmarshal(config, &object))
	delete(object, "prevResult")
	encoded, err := json.Marshal(object)
	check(t, err)
	return encoded
}
