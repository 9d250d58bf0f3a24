package crash

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/leak"
	"github.com/minicri/minicri/test/nodetest"
)

type damaged struct {
	name   string
	damage func(file []byte) []byte
}

var damages = []damaged{
	{"truncated", func(file []byte) []byte { return file[:len(file)/2] }},
	{"empty", func([]byte) []byte { return nil }},
	{"garbage", func(file []byte) []byte { return bytes.Repeat([]byte{0xff, 0}, len(file)/2) }},
	{"of no version", func([]byte) []byte { return []byte(`{}`) }},
	{"without a config", func([]byte) []byte { return []byte(`{"version": 1, "record": {"created_at": 1}}`) }},
	{"of another form", func([]byte) []byte { return []byte(`{"version": 1, "record": [1]}`) }},
	{"gone", nil},
}

const goneAtUpgrade = "gone at an upgrade"

// A record that cannot be decoded is shown, and what it describes is left alone, over restarts: the pod runs on.
// Given up by a person, it is removed. The other pods do not notice. Facts are volatile: a sandbox whose facts are
// lost, and whose pause lives, is listed NotReady and not touched until it is stopped and removed.
func TestProperty9_RecordThatCannotBeRead(t *testing.T) {
	n := newNode(t)
	n.runWitness(t)
	kinds := map[string][]damaged{"record": damages[:6], "facts": {damages[0], damages[1], damages[2], damages[6], {goneAtUpgrade, nil}}}
	for kind, all := range kinds {
		for _, d := range all {
			t.Run(kind+" "+d.name, func(t *testing.T) {
				before := n.Look()
				id := n.RunPod(n.PodConfig("victim"))
				pause := n.pausePID(t, id)
				n.Kill()
				listed, file := []string{n.witness.Id}, n.record(id)
				if kind == "facts" {
					listed, file = []string{n.witness.Id, id}, n.facts(id)
				}
				damage(t, file, d.damage)
				if d.name == goneAtUpgrade { // the next build replaces pause by its own
					harness.Check(t, os.Remove(filepath.Join(n.Root, "pause", "rootfs", "pause")))
				}
				for range 2 {
					n.Start()
					n.checkWitness(t)
					n.wantListed(t, listed...)
					if kind == "record" {
						n.wantQuarantined(t, id)
					} else {
						n.wantState(t, id, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
					}
					harness.Need(t, alive(pause), "its pause was killed")
					n.Kill()
				}
				harness.Check(t, os.RemoveAll(filepath.Join(n.Root, "sandboxes", "quarantine")))
				n.Start()
				if kind == "facts" {
					n.RemovePod(id)
				}
				n.wantSame(t, before)
				n.RemovePod(n.RunPod(n.PodConfig("victim")))
			})
		}
	}
}

// wantQuarantined: the verbose status shows the records of these ids and no others.
func (n *node) wantQuarantined(t *testing.T, ids ...string) {
	var shown []string
	for _, file := range nodetest.Info[[]string](t, n.Node, "quarantinedRecords") {
		shown = append(shown, strings.TrimSuffix(filepath.Base(file), ".json"))
	}
	slices.Sort(shown)
	same(t, "records in quarantine, by the verbose status", shown, ids)
}

// alive reports whether the process is pause, whose file another build may have replaced.
func alive(pid int) bool {
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	return err == nil && filepath.Base(strings.TrimSuffix(exe, " (deleted)")) == "pause"
}

// A file of a later schema refuses the start, names the file and the version that wrote it, and costs nothing.
func TestProperty52_FileOfALaterSchema(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("victim"))
	was := n.status(t, id)
	n.Kill()
	for _, file := range []string{n.record(id), n.facts(id), n.attachment(id)} {
		whole := harness.Read(t, file)
		damage(t, file, func(data []byte) []byte {
			return bytes.Replace(data, []byte(`"version": 1`), []byte(`"version": 1000, "ignored": 1`), 1)
		})
		harness.Need(t, n.TryStart() != nil, "the daemon has started with %s of a later schema", file)
		log := n.Log()
		harness.Want(t, strings.Contains(log, file) && strings.Contains(log, "schema 1000") && !strings.Contains(log, "unnamed version"),
			"the log does not name %s, or who wrote it", file)
		harness.Check(t, os.WriteFile(file, whole, 0o600))
	}
	n.Start()
	same(t, "status of the pod", n.status(t, id), was)
	n.RemovePod(id)
}

// Of two records with one name the newer one counts; a copy under another name
// is no one's, and what it describes is not touched.
func TestProperty9_TwoRecordsOfOneName(t *testing.T) {
	n := newNode(t)
	n.runWitness(t)
	twin, double := strings.Repeat("ab", 32), strings.Repeat("cd", 32)
	n.Kill()
	record := harness.Read(t, n.record(n.witness.Id))
	older := regexp.MustCompile(`"created_at": \d+`).ReplaceAll(bytes.ReplaceAll(record, []byte(n.witness.Id), []byte(twin)), []byte(`"created_at": 1`))
	harness.Check(t, os.WriteFile(n.record(twin), older, 0o600))
	facts := harness.Read(t, n.facts(n.witness.Id))
	harness.Check(t, os.WriteFile(n.facts(twin), facts, 0o600))
	harness.Check(t, os.WriteFile(n.record(double), record, 0o600))
	n.Start()

	n.checkWitness(t)
	n.wantListed(t, n.witness.Id)
	n.wantQuarantined(t, twin, double)
	harness.Check(t, os.RemoveAll(filepath.Join(n.Root, "sandboxes", "quarantine")))
	harness.Check(t, os.Remove(n.facts(twin))) // it was left alone, too
}

// A sandbox that could not be made, nor rolled back, keeps its name, over a restart
// too: there is never a second one of the name.
func TestProperty8_NameOfAHalfMadeSandbox(t *testing.T) {
	n := newNode(t)
	before := n.Look()
	config := n.PodConfig("half")
	n.Arm(t, "pod/start before error", "pod/remove files before error")
	_, err := n.run(harness.Limited(t), config)
	harness.Need(t, err != nil, "the request succeeded")
	half := n.list(t)
	harness.Need(t, len(half) == 1 && half[0].State == runtimeapi.PodSandboxState_SANDBOX_NOTREADY, "listed: %v", half)
	_, err = n.run(harness.Limited(t), config)
	harness.Want(t, err != nil, "a second request succeeded")
	for range 2 {
		n.wantListed(t, half[0].Id)
		n.Crash()
		// It is tried again in the background, in vain.
		harness.Eventually(t, "it is listed again", func() bool { return len(n.list(t)) == 1 })
		_, err := n.run(harness.Limited(t), config)
		wantCode(t, err, codes.AlreadyExists)
	}
	n.Disarm(t)
	n.RemovePod(half[0].Id)
	n.RemovePod(n.RunPod(config))
	n.wantSame(t, before)
}

func (n *node) record(id string) string     { return filepath.Join(n.Root, "sandboxes", id+".json") }
func (n *node) facts(id string) string      { return filepath.Join(n.State, "facts", id+".json") }
func (n *node) attachment(id string) string { return filepath.Join(n.Root, "attachments", id+".json") }

func damage(t *testing.T, file string, change func([]byte) []byte) {
	if change == nil {
		harness.Check(t, os.Remove(file))
		return
	}
	harness.Check(t, os.WriteFile(file, change(harness.Read(t, file)), 0o600))
}

// wantListed: these sandboxes are listed, in any order, and no others.
func (n *node) wantListed(t *testing.T, want ...string) {
	var got []string
	for _, pod := range n.list(t) {
		got = append(got, pod.Id)
	}
	slices.Sort(got)
	slices.Sort(want)
	same(t, "listed", got, want)
}

func (n *node) wantSame(t *testing.T, before leak.Snapshot) {
	same(t, "differences", n.Differences(before), nil)
}

func (n *node) wantState(t *testing.T, id string, want runtimeapi.PodSandboxState) {
	same(t, "state of sandbox "+id, n.status(t, id).GetState(), want)
}

// atOnce is how many nodes are at work, unless -parallel says so: most of the time a case waits.
const atOnce = "4"

// TestMain chooses the binaries with failpoints.
func TestMain(m *testing.M) {
	binaries, err := filepath.Abs("../../bin/failpoints")
	if err == nil && os.Getenv("MINICRI_BIN") == "" {
		err = os.Setenv("MINICRI_BIN", binaries)
	}
	if err == nil {
		_, err = os.Stat(filepath.Join(os.Getenv("MINICRI_BIN"), "trip"))
	}
	if err == nil {
		err = flag.Set("test.parallel", atOnce)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "crash: it needs binaries with failpoints, see 'make failpoints':", err)
		os.Exit(1)
	}
	os.Exit(nodetest.Main(m))
}

// node is a node with failpoints and with plugins of the test in its chain.
type node struct {
	*nodetest.Node
	nodetest.Failpoints
	calls   string                       // what trip wrote down
	witness *runtimeapi.PodSandboxStatus // of the pod that has to stay Ready, or nil
}

const limits = `[limits]
reload = "50ms"
retry_first = "20ms"
retry_most = "100ms"
`

func newNode(t *testing.T, opts ...nodetest.Option) *node {
	dir := t.TempDir()
	n := &node{Failpoints: nodetest.Failpoints(filepath.Join(dir, "points")), calls: filepath.Join(dir, "calls")}
	n.Node = nodetest.New(t, append([]nodetest.Option{
		nodetest.Parallel(), nodetest.NoNetwork(), nodetest.Config(limits), n.Failpoints.Option(),
	}, opts...)...)
	harness.Check(t, os.Symlink(filepath.Join(os.Getenv("MINICRI_BIN"), "trip"), filepath.Join(n.Plugins, "trip")))
	n.writeChain()
	return n
}

const addresses = 3

// writeChain configures a chain with a trip before, between and behind bridge and portmap.
func (n *node) writeChain() {
	bridge := n.BridgePlugin()
	bridge["ipam"].(nodetest.Object)["ranges"] = [][]nodetest.Object{{{
		"subnet": "10.88.0.0/16", "rangeStart": "10.88.0.2", "rangeEnd": fmt.Sprintf("10.88.0.%d", 1+addresses),
	}}}
	portmap := nodetest.Object{"type": "portmap", "capabilities": nodetest.Object{"portMappings": true}, "snat": true}
	n.WriteConflist("10-chain.conflist", n.trip("first"), bridge, n.trip("middle"), portmap, n.trip("last"))
}

func (n *node) trip(as string) nodetest.Object {
	return nodetest.Object{"type": "trip", "as": as, "record": n.calls}
}

func (n *node) waitEnd(t testing.TB) {
	harness.Eventually(t, "the daemon ends", func() bool { return !n.Running() })
}

func (n *node) run(ctx context.Context, config *runtimeapi.PodSandboxConfig) (string, error) {
	answer, err := n.Runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
	return answer.GetPodSandboxId(), err
}

func (n *node) stop(ctx context.Context, id string) error {
	_, err := n.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	return err
}

func (n *node) remove(ctx context.Context, id string) error {
	_, err := n.Runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	return err
}

func (n *node) list(t testing.TB) []*runtimeapi.PodSandbox {
	return nodetest.Call(t, n.Runtime.ListPodSandbox, &runtimeapi.ListPodSandboxRequest{}).GetItems()
}

func (n *node) status(t testing.TB, id string) *runtimeapi.PodSandboxStatus {
	return nodetest.Call(t, n.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id}).GetStatus()
}

func (n *node) pausePID(t testing.TB, id string) int {
	answer := nodetest.Call(t, n.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	var info struct{ PID int }
	harness.Check(t, json.Unmarshal([]byte(answer.GetInfo()["info"]), &info))
	return info.PID
}

// same fails the test unless two values are the same.
func same[T any](t testing.TB, what string, got, want T) { harness.Same(t, what, got, want) }
