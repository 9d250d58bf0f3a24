package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// pluginCall is one run of the recording plugin as it saw it.
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

// pluginConfig are the plugin's own keys of a network configuration.
type pluginConfig struct {
	As   string `json:"as"`  // its name in the record
	Dir  string `json:"dir"` // where it records, and finds what to do
	Wrap string `json:"wrap"`

	CNIVersion string          `json:"cniVersion"`
	PrevResult json.RawMessage `json:"prevResult"`
}

// pluginMain is the recording plugin (CNI SPEC 1.1). It writes down each call
// and then does what the file AS.VERB says: "fail CODE MESSAGE" or "hang", and
// otherwise what the plugin does that it wraps; without one it hands on the
// result that it got.
func pluginMain() int {
	verb := os.Getenv("CNI_COMMAND")
	if verb == "VERSION" {
		fmt.Println(`{"cniVersion": "1.1.0", "supportedVersions": ["0.4.0", "1.0.0", "1.1.0"]}`)
		return 0
	}
	input, err := io.ReadAll(os.Stdin)
	var config pluginConfig
	if err == nil {
		err = json.Unmarshal(input, &config)
	}
	if err == nil {
		err = recordCall(config, verb, input)
	}
	if err != nil {
		return pluginError(config, 100, err.Error())
	}
	order, _ := os.ReadFile(filepath.Join(config.Dir, config.As+"."+verb))
	words := strings.SplitN(strings.TrimSpace(string(order)), " ", 3)
	switch {
	case words[0] == "hang":
		return hang(config)
	case words[0] == "fail":
		var code int
		fmt.Sscan(words[1], &code)
		return pluginError(config, code, words[2])
	case config.Wrap != "":
		return wrap(config.Wrap, input)
	}
	if verb == "ADD" {
		fmt.Println(string(config.PrevResult))
	}
	return 0
}

func recordCall(config pluginConfig, verb string, input []byte) error {
	line, err := json.Marshal(pluginCall{
		As: config.As, Verb: verb, Container: os.Getenv("CNI_CONTAINERID"), Netns: os.Getenv("CNI_NETNS"),
		Interface: os.Getenv("CNI_IFNAME"), Args: os.Getenv("CNI_ARGS"), PID: os.Getpid(), Config: input,
	})
	if err != nil {
		return err
	}
	file, err := os.OpenFile(filepath.Join(config.Dir, "calls"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(append(line, '\n'))
	return errors.Join(err, file.Close())
}

func pluginError(config pluginConfig, code int, message string) int {
	answer, _ := json.Marshal(harness.Object{"cniVersion": config.CNIVersion, "code": code, "msg": message})
	fmt.Println(string(answer))
	return 1
}

// hang starts a child that holds our pipes, as an IPAM plugin does, and waits.
func hang(config pluginConfig) int {
	child := exec.Command("sleep", "600")
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	if err := child.Start(); err != nil {
		return pluginError(config, 100, err.Error())
	}
	_ = os.WriteFile(filepath.Join(config.Dir, "hangs"), fmt.Appendf(nil, "%d %d", os.Getpid(), child.Process.Pid), 0o600)
	_ = child.Wait()
	return 1
}

// wrap becomes the other plugin, with the same input and environment.
func wrap(name string, input []byte) int {
	for _, dir := range filepath.SplitList(os.Getenv("CNI_PATH")) {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err != nil {
			continue
		}
		plugin := exec.Command(path)
		plugin.Stdin, plugin.Stdout, plugin.Stderr = bytes.NewReader(input), os.Stdout, os.Stderr
		if err := plugin.Run(); err != nil {
			return max(plugin.ProcessState.ExitCode(), 1)
		}
		return 0
	}
	return 1
}

// recorder is the recording plugin of one node.
type recorder struct {
	t   *testing.T
	n   *harness.Node
	dir string
}

// newRecorder installs the plugin.
func newRecorder(t *testing.T, n *harness.Node) *recorder {
	t.Helper()
	self, err := os.Executable()
	check(t, err)
	check(t, os.Symlink(self, filepath.Join(n.Plugins, "recorder")))
	dir := filepath.Join(n.Dir, "record")
	check(t, os.Mkdir(dir, 0o755))
	return &recorder{t: t, n: n, dir: dir}
}

// plugin is its configuration; keys are added to it.
func (r *recorder) plugin(as string, keys harness.Object) harness.Object {
	config := harness.Object{"type": "recorder", "as": as, "dir": r.dir}
	for key, value := range keys {
		config[key] = value
	}
	return config
}

// bridge records and does what the bridge plugin does.
func (r *recorder) bridge(as string) harness.Object {
	keys := r.n.BridgePlugin()
	delete(keys, "type")
	keys["wrap"] = "bridge"
	return r.plugin(as, keys)
}

// order says what the plugin of that name is to do at the verb: "fail CODE
// MESSAGE", "hang", or "" for its work.
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
