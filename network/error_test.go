package network

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/network/runner"
)

// attachError attaches with a chain of plugins, which has to fail, and returns
// the error with the rows of its plugins.
func (n *node) attachError(t *testing.T, plugins ...map[string]any) (*PluginError, []step.Row) {
	t.Helper()
	n.configure(t, "10.conflist", "net", plugins...)
	n.journalled(t, "web", nil)
	timeline := step.NewTimeline(nil)
	var blamed *PluginError
	steps := step.Begin(t.Context(), nil, timeline)
	err := steps.Do("pod/cni add", func(ctx context.Context) error {
		_, err := n.Attach(ctx, "web", n.Options.Namespaces.Path("web"))
		return err
	})
	if !errors.As(err, &blamed) {
		t.Fatalf("no plugin is to blame: %v", err)
	}
	t.Log(err)
	return blamed, timeline.Rows()
}

func rowOf(t *testing.T, rows []step.Row, name string) step.Row {
	t.Helper()
	for _, row := range rows {
		if row.Step == name {
			return row
		}
	}
	t.Fatalf("no row %s: %+v", name, rows)
	return step.Row{}
}

// A plugin says again what its IPAM plugin said.
func TestErrorOfAFullRange(t *testing.T) {
	n := newNode(t, nil)
	chain := n.chain(t)
	chain[0]["ipam"].(map[string]any)["ranges"] = []any{[]any{map[string]string{"subnet": "10.97.0.0/30"}}}
	n.configure(t, "10.conflist", "net", chain...)
	n.journalled(t, "first", nil)
	n.attach(t, "first")
	blamed, rows := n.attachError(t, chain...)
	if blamed.Name != "bridge" || blamed.Verb != "ADD" || blamed.Code == 0 {
		t.Errorf("to blame is %+v", blamed)
	}
	wantError(t, blamed, "plugin bridge: ", "no IP addresses available", "CNI error code", `network "net" has no free address: remove pods, or give it a larger range`)
	if bridge := rowOf(t, rows, "bridge ADD"); bridge.Error == "" || bridge.Parent != "cni add" || bridge.Plugin == nil || bridge.Plugin.Exit != 1 || bridge.Plugin.Code != blamed.Code {
		t.Errorf("row %+v", bridge)
	}
	n.detach(t, "web")
	n.detach(t, "first")
}

// What is no result is shown: nothing else says what is wrong.
func TestErrorOfRubbish(t *testing.T) {
	for text, shown := range map[string]string{"Connecting to the agent ... done": "Connecting to the agent", `{"cniVersion": "1.0.0", "ips": [`: "no CNI result", "": "no CNI result"} {
		n := newNode(t, nil)
		bin := filepath.Join(t.TempDir(), "bin")
		must(t, os.Mkdir(bin, 0o700))
		put(t, filepath.Join(bin, "rubbish"), "#!/bin/sh\n[ $CNI_COMMAND != ADD ] || printf '%s' '"+text+"'\necho words >&2\n")
		must(t, os.Chmod(filepath.Join(bin, "rubbish"), 0o755))
		n.Options.BinDirs = []string{bin}
		n.reopen(t)
		blamed, rows := n.attachError(t, map[string]any{"type": "rubbish"})
		wantError(t, blamed, "plugin rubbish: it succeeded, and what it printed is no CNI result", shown, "stdout")
		if row := rowOf(t, rows, "rubbish ADD"); row.Error == "" || row.Plugin.Exit != 0 || row.Plugin.Stderr != "words\n" {
			t.Errorf("row %+v, %+v", row, row.Plugin)
		}
	}
}

// A plugin is blamed for its own answer, not for what libcni refuses before the next one.
func TestErrorBetweenTwoPlugins(t *testing.T) {
	for sought, blames := range map[int]bool{1: true, 2: false} {
		run := &runner.Run{Request: runner.Request{Verb: "ADD", Network: "net", Plugins: 2}}
		for range sought {
			_, err := run.FindInPath("bridge", nil)
			must(t, err)
		}
		reports := []runner.Report{{Plugin: step.Plugin{Name: "bridge", Verb: "ADD"}}}
		refused := errors.New("refused")
		err := failure(run, reports, refused, nil)
		if _, blamed := errors.AsType[*PluginError](err); blamed != blames || !errors.Is(err, refused) {
			t.Errorf("%d of 2 plugins were sought: %v", sought, err)
		}
	}
}
