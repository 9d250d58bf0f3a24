package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// failing is a network that cannot attach a pod, with the texts that name object, cause and remedy: in the error of
// RunPodSandbox, in the timeline of the pod, and in check.
type failing struct {
	name     string
	conflist string            // the only file in cni_conf_dir, "" for none
	plugins  map[string]string // scripts, or other files, by name
	mode     os.FileMode       // the mode of the plugins
	run      []string
	timeline []string
	check    []string
}

// okScript is a plugin that runs a command at ADD, and else succeeds.
const okScript = `#!/bin/sh
case $CNI_COMMAND in
VERSION) echo '{"cniVersion":"1.1.0","supportedVersions":["0.4.0","1.0.0","1.1.0"]}' ;;
ADD) cat >/dev/null; %s ;;
*) cat >/dev/null ;;
esac
`

// listOf is a network of one plugin.
func listOf(version, plugin string) string {
	return fmt.Sprintf(`{"cniVersion":%q,"name":"corp","plugins":[%s]}`, version, plugin)
}

// bridgeWith is the plugin bridge with host-local.
func bridgeWith(ipam string) string {
	return listOf("1.0.0", `{"type":"bridge","bridge":"%BRIDGE","ipam":{"type":"host-local",`+ipam+`}}`)
}

const foreignELF = "\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"

var failures = []failing{
	{
		name:  "no file",
		run:   []string{"no CNI configuration", "put a .conflist there, or set default_network.enabled"},
		check: []string{"no CNI configuration", "put a .conflist there, or set default_network.enabled"},
	},
	{
		name: "broken JSON", conflist: "{\n \"cniVersion\": \"1.0.0\",\n \"name\": \"corp\"\n \"plugins\": []}",
		run:   []string{"10-test.conflist: line 4", "invalid character"},
		check: []string{"10-test.conflist: line 4", "invalid character"},
	},
	{
		name: "unsupported version", conflist: listOf("9.9.0", `{"type":"ok"}`),
		plugins: map[string]string{"ok": fmt.Sprintf(okScript, ":")}, mode: 0o755,
		run:   []string{"9.9.0", "ok", "1.1.0"},
		check: []string{"9.9.0", "1.1.0"},
	},
	{
		name: "missing plugin", conflist: listOf("1.0.0", `{"type":"calico"}`),
		run:   []string{"calico", "install it or set cni_bin_dir"},
		check: []string{"calico", "cni_bin_dir"},
	},
	{
		name: "not executable", conflist: listOf("1.0.0", `{"type":"ok"}`),
		plugins: map[string]string{"ok": fmt.Sprintf(okScript, ":")}, mode: 0o644,
		run:   []string{"plugin ok", "chmod +x"},
		check: []string{"ok", "chmod +x"},
	},
	{
		name: "another architecture", conflist: listOf("1.0.0", `{"type":"ok"}`),
		plugins: map[string]string{"ok": foreignELF + strings.Repeat("\x00", 100)}, mode: 0o755,
		run:   []string{"plugin ok", "for another architecture than"},
		check: []string{"ok", "another architecture"},
	},
	{
		name:     "an unusable directory of addresses",
		conflist: bridgeWith(`"dataDir":"/proc/nope","subnet":"10.77.0.0/24"`),
		run:      []string{"bridge", `network "corp"`, "/proc/nope", "set another dataDir"},
		timeline: []string{"✗ bridge ADD", "the pod failed at cni add", "/proc/nope", "set another dataDir"},
	},
	{
		name: "a full range", conflist: bridgeWith(`"dataDir":"%DIR/full","ranges":[[
			{"subnet":"10.77.0.0/30","rangeStart":"10.77.0.2","rangeEnd":"10.77.0.2","gateway":"10.77.0.1"}]]`),
		run:      []string{"has no free address", "larger range"},
		timeline: []string{"✗ bridge ADD", "has no free address", "larger range"},
	},
	{
		name: "the API server of the plugin is away", conflist: listOf("1.0.0", `{"type":"ok"}`),
		plugins: map[string]string{"ok": fmt.Sprintf(okScript,
			`echo '{"cniVersion":"1.0.0","code":11,"msg":"Get https://10.0.0.1:443/api: connection refused"}'
			exit 1`)},
		mode: 0o755,
		run: []string{
			`CNI ADD of network "corp"`, "plugin ok", "connection refused", "CNI error code 11",
			"see whether the agent or the API server",
		},
		timeline: []string{"✗ ok ADD", "connection refused"},
	},
	{
		name: "a plugin that ends without an answer", conflist: listOf("1.0.0", `{"type":"ok"}`),
		plugins: map[string]string{"ok": fmt.Sprintf(okScript, "echo 'panic: oops' >&2; exit 3")}, mode: 0o755,
		run:      []string{"plugin ok", "exit code 3", "panic: oops"},
		timeline: []string{"✗ ok ADD", "exit code 3", "panic: oops"},
	},
}

// Each surface names the object, the cause and the remedy of a network's failure, and all agree.
func TestFailuresOfNetworks(t *testing.T) {
	n := newNode(t, nodetest.NoNetwork())
	file := filepath.Join(n.CNIConf, "10-test.conflist")
	for _, f := range failures {
		t.Run(f.name, func(t *testing.T) {
			for name, content := range f.plugins {
				check(t, os.WriteFile(filepath.Join(n.Plugins, name), []byte(content), f.mode))
				check(t, os.Chmod(filepath.Join(n.Plugins, name), f.mode))
			}
			if f.conflist != "" {
				text := strings.NewReplacer("%BRIDGE", n.Bridge, "%DIR", n.Dir).Replace(f.conflist)
				check(t, os.WriteFile(file, []byte(text), 0o644))
			}
			if strings.Contains(f.name, "full") {
				defer n.RemovePod(n.RunPod(n.PodConfig("first")))
			}
			name := "pod-" + strings.ReplaceAll(f.name, " ", "-")
			_, err := runBy(t, n, n.PodConfig(name), "")
			harness.Need(t, err != nil, "the pod has run")
			wantTexts(t, "RunPodSandbox", err.Error(), f.run)
			output, _ := n.RunCommand("timeline", name) // fails for a pod that was refused
			wantTexts(t, "timeline", output, f.timeline)
			output, _ = n.RunCommand("check", "--quiet") // fails for a problem
			wantTexts(t, "check", output, f.check)
			for name := range f.plugins {
				check(t, os.Remove(filepath.Join(n.Plugins, name)))
			}
			check(t, os.RemoveAll(file))
		})
	}
}

func wantTexts(t *testing.T, surface, got string, texts []string) {
	for _, text := range texts {
		oneLine := strings.Join(strings.Fields(got), " ")
		harness.Want(t, strings.Contains(oneLine, text), "%s lacks %q:\n%s", surface, text, got)
	}
}
