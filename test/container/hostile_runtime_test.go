package container

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// hostile writes a program that is the real runtime, but for a verb.
func hostile(t *testing.T, real, verb, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), filepath.Base(real))
	text := fmt.Sprintf("#!/bin/sh\nhas() { for a; do [ \"$a\" = %s ] && return 0; done; return 1; }\n"+
		"pidfile() { while [ $# -gt 0 ]; do [ \"$1\" = --pid-file ] && echo \"$2\"; shift; done; }\n"+
		"has \"$@\" && { %s\n}\nexec %s \"$@\"\n", verb, script, real)
	check(t, os.WriteFile(path, []byte(text), 0o755))
	return path
}

// A runtime that lies, dies, floods or hangs fails its own container, with an
// error that says what it did; nothing else is touched, and nothing is left: a
// process of another owner above all, whose pid it reports.
func TestHostileOCIRuntimes(t *testing.T) {
	const hangs = "sleep 86395 & sleep 86395; exit 1"
	for name, c := range map[string]struct{ verb, script, says string }{
		"a foreign pid":      {"create", `echo 1 > $(pidfile "$@"); exit 0`, "process 1 is not one that it has started"},
		"no process at all":  {"create", "exit 0", "has made no process"},
		"rubbish for a pid":  {"create", `echo -1 > $(pidfile "$@"); exit 0`, "no process id"},
		"a flood of errors":  {"create", "head -c 3000000 /dev/zero >&2; head -c 3000000 /dev/zero; exit 1", "create: exit status 1"},
		"its own death":      {"create", "kill -9 $$", "create: signal: killed"},
		"a start that fails": {"start", "exit 4", "start: exit status 4"},
		"a child it leaves":  {"create", "sleep 86395 & exit 5", "create: exit status 5"},
		"another's cgroup":   {"create", `sleep 86395 & echo $! > $(pidfile "$@"); exit 0`, "has put process"},
		"hangs in create":    {"create", hangs, ""},
		"hangs in start":     {"start", hangs, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var limit string
			if c.script == hangs {
				limit = "[limits]\ncreate = '8s'"
			}
			n := newNode(t, harness.Runtime("hostile", hostile(t, runc(t), c.verb, c.script)), harness.Config(limit))
			p, other := runPod(t, n, "web"), runBuiltin(t, n, "other")
			err := p.inTime(time.Minute, func() error {
				id, err := p.tryCreate(shell("app", forever))
				if err == nil {
					err = p.start(id)
				}
				return err
			})
			if err == nil || !strings.Contains(err.Error(), c.says) || len(err.Error()) > 5000 {
				t.Errorf("got %.2000v, want an error that says %q", err, c.says)
			}
			other.exec(other.run("app", forever), "true")
			n.RemovePod(p.id)
			eventually(t, "what it has started has ended", func() bool { return len(processesWithArgument(t, "86395")) == 0 })
		})
	}
}

// runBuiltin runs a pod that names no handler.
func runBuiltin(t *testing.T, n *harness.Node, name string) *pod {
	t.Helper()
	p := &pod{Node: n, t: t, config: n.PodConfig(name)}
	answer, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: p.config})
	check(t, err)
	p.id = answer.PodSandboxId
	return p
}

// processesWithArgument are the processes that have it on their command line.
func processesWithArgument(t *testing.T, argument string) (pids []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	check(t, err)
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err == nil && strings.Contains(string(line), "\x00"+argument+"\x00") {
			pids = append(pids, file)
		}
	}
	return pids
}
