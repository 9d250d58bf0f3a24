// Command recorder is a CNI plugin for tests. It writes down how it was called
// and can be made to fail, to hang or to wait.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

func main() { os.Exit(plugin()) }

// call is what is written down of one run.
type call struct {
	As        string          `json:"as"`
	Verb      string          `json:"verb"`
	Container string          `json:"container"`
	Netns     string          `json:"netns"`
	Interface string          `json:"interface"`
	Args      string          `json:"args"`
	PID       int             `json:"pid"`
	Config    json.RawMessage `json:"config"`
}

// config are the keys of a network configuration that it knows.
type config struct {
	As   string `json:"as"`  // its name in the record
	Dir  string `json:"dir"` // where it records, and finds what to do
	Wrap string `json:"wrap"`

	CNIVersion string          `json:"cniVersion"`
	PrevResult json.RawMessage `json:"prevResult"`
}

// plugin is the recording plugin (CNI SPEC 1.1). It writes down each call and then does
// what the file AS.VERB says: "fail CODE MESSAGE", "hang", or "wait" until the file is
// gone, and otherwise what the plugin does that it wraps; without one it hands on the
// result that it got.
func plugin() int {
	verb := os.Getenv("CNI_COMMAND")
	if verb == "VERSION" {
		fmt.Println(`{"cniVersion": "1.1.0", "supportedVersions": ["0.4.0", "1.0.0", "1.1.0"]}`)
		return 0
	}
	input, err := io.ReadAll(os.Stdin)
	var c config
	if err == nil {
		err = json.Unmarshal(input, &c)
	}
	if err == nil {
		err = record(c, verb, input)
	}
	if err != nil {
		return answerError(c, 100, err.Error())
	}
	words := readOrder(c, verb)
	for words[0] == "wait" {
		time.Sleep(5 * time.Millisecond)
		words = readOrder(c, verb)
	}
	switch {
	case words[0] == "hang":
		return hang(c)
	case words[0] == "fail":
		var code int
		fmt.Sscan(words[1], &code)
		return answerError(c, code, words[2])
	case c.Wrap != "":
		return wrap(c.Wrap, input)
	}
	if verb == "ADD" {
		fmt.Println(string(c.PrevResult))
	}
	return 0
}

func readOrder(c config, verb string) []string {
	order, _ := os.ReadFile(filepath.Join(c.Dir, c.As+"."+verb))
	return strings.SplitN(strings.TrimSpace(string(order)), " ", 3)
}

func record(c config, verb string, input []byte) error {
	line, err := json.Marshal(call{
		As: c.As, Verb: verb, Container: os.Getenv("CNI_CONTAINERID"), Netns: os.Getenv("CNI_NETNS"),
		Interface: os.Getenv("CNI_IFNAME"), Args: os.Getenv("CNI_ARGS"), PID: os.Getpid(), Config: input,
	})
	if err != nil {
		return err
	}
	file, err := os.OpenFile(filepath.Join(c.Dir, "calls"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(append(line, '\n'))
	return errors.Join(err, file.Close())
}

func answerError(c config, code int, message string) int {
	answer, _ := json.Marshal(map[string]any{"cniVersion": c.CNIVersion, "code": code, "msg": message})
	fmt.Println(string(answer))
	return 1
}

// hang starts a child that holds our pipes, as an IPAM plugin does, and waits.
func hang(c config) int {
	child := exec.Command("sleep", "600")
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	if err := child.Start(); err != nil {
		return answerError(c, 100, err.Error())
	}
	_ = os.WriteFile(filepath.Join(c.Dir, "hangs"), fmt.Appendf(nil, "%d %d", os.Getpid(), child.Process.Pid), 0o600)
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
