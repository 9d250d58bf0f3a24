package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// pluginCall is one run of the recording plugin as it saw it, see recorder/.
type pluginCall struct {
	As        string          `json:"as"`
	Verb      string          `json:"verb"`
	Container string          `json:"container"`
	Netns     string          `json:"netns"`
	Interface string          `json:"interface"`
	Args      string          `json:"args"`
	PID       int             `json:"pid"`
	Config    json.RawMessage `json:"config"`
}

// recorderPath is where the recording plugin is built; TestMain sets it.
var recorderPath string

// recorder is the recording plugin of one node.
type recorder struct {
	t    *testing.T
	n    *harness.Node
	path string // of the program
	dir  string // of its records and orders
}

// buildRecorder builds the plugin once for all tests: a small program, as the
// race detector would make it slow.
var buildRecorder = sync.OnceValues(func() (string, error) {
	build := exec.Command("go", "build", "-o", recorderPath, "./recorder")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	output, err := build.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("building the plugin: %w: %s", err, output)
	}
	return recorderPath, err
})

// newRecorder makes a recorder for a node.
func newRecorder(t *testing.T, n *harness.Node) *recorder {
	t.Helper()
	path, err := buildRecorder()
	check(t, err)
	dir := filepath.Join(n.Dir, "record")
	check(t, os.Mkdir(dir, 0o755))
	return &recorder{t: t, n: n, path: path, dir: dir}
}

// plugin installs the plugin under a name and returns its configuration, with
// the keys added.
func (r *recorder) plugin(as string, keys harness.Object) harness.Object {
	r.t.Helper()
	if err := os.Symlink(r.path, filepath.Join(r.n.Plugins, as)); !errors.Is(err, fs.ErrExist) {
		check(r.t, err)
	}
	config := harness.Object{"type": as, "as": as, "dir": r.dir}
	for key, value := range keys {
		config[key] = value
	}
	return config
}

// bridge records and does what the bridge plugin does.
func (r *recorder) bridge(as string) harness.Object {
	r.t.Helper()
	keys := r.n.BridgePlugin()
	delete(keys, "type")
	keys["wrap"] = "bridge"
	return r.plugin(as, keys)
}

// addressesOnly is bridge without masquerading: with an empty CNI_NETNS the
// bridge plugin frees the address and leaves the rules.
func (r *recorder) addressesOnly(as string) harness.Object {
	r.t.Helper()
	config := r.bridge(as)
	config["ipMasq"] = false
	return config
}

// order says what the plugin of that name is to do at the verb: "fail CODE
// MESSAGE", "hang", "wait" for another order, or "" for its work.
func (r *recorder) order(as, verb, what string) {
	r.t.Helper()
	path := filepath.Join(r.dir, as+"."+verb)
	if what == "" {
		err := os.Remove(path)
		if !errors.Is(err, fs.ErrNotExist) {
			check(r.t, err)
		}
		return
	}
	check(r.t, os.WriteFile(path, []byte(what), 0o600))
}

// calls are those of the verb so far; of all but STATUS and GC when it is "".
func (r *recorder) calls(verb string) []pluginCall {
	r.t.Helper()
	data, err := os.ReadFile(filepath.Join(r.dir, "calls"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	check(r.t, err)
	var calls []pluginCall
	for line := range bytes.Lines(data) {
		var call pluginCall
		check(r.t, json.Unmarshal(line, &call))
		if call.Verb == verb || verb == "" && call.Verb != "STATUS" && call.Verb != "GC" {
			calls = append(calls, call)
		}
	}
	return calls
}

// forget clears the record.
func (r *recorder) forget() {
	r.t.Helper()
	check(r.t, os.RemoveAll(filepath.Join(r.dir, "calls")))
}

// sequence is the calls in one line: "ADD one, DEL two".
func sequence(calls []pluginCall) string {
	var words []string
	for _, call := range calls {
		words = append(words, call.Verb+" "+call.As)
	}
	return strings.Join(words, ", ")
}

// hung waits for a hanging plugin and returns its process and its child's.
func (r *recorder) hung() (pids []int) {
	r.t.Helper()
	pids = make([]int, 2)
	eventually(r.t, "a plugin hangs", patience, func() bool {
		data, err := os.ReadFile(filepath.Join(r.dir, "hangs"))
		if err != nil {
			return false
		}
		count, _ := fmt.Sscan(string(data), &pids[0], &pids[1])
		return count == 2
	})
	return pids
}

// addresses are those that host-local has handed out.
func addresses(t *testing.T, n *harness.Node) []string {
	t.Helper()
	entries, err := os.ReadDir(n.Addresses)
	if !errors.Is(err, fs.ErrNotExist) {
		check(t, err)
	}
	var found []string
	for _, entry := range entries {
		if strings.ContainsAny(entry.Name(), ".:") && !strings.HasPrefix(entry.Name(), "last_reserved") {
			found = append(found, entry.Name())
		}
	}
	return found
}
