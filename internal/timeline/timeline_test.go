package timeline

import (
	"bytes"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/test/harness"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func row(kind, name, parent string, start, took int, err string) step.Row {
	r := step.Row{Kind: kind, Step: name, Parent: parent, Start: noon.Add(time.Duration(start) * time.Millisecond), Took: time.Duration(took) * time.Millisecond, Error: err}
	if kind == "plugin" {
		plugin, verb, _ := strings.Cut(name, " ")
		r.Plugin = &step.Plugin{Name: plugin, Verb: verb}
		if err != "" {
			r.Plugin.Exit, r.Plugin.Code, r.Plugin.Message = 1, 11, err
		}
	}
	return r
}

// failedPod is a pod whose IPAM plugin fails, and which is undone.
func failedPod() Pod {
	ipam := row("plugin", "host-local ADD", "bridge ADD", 12, 3, "no address <b>")
	ipam.Plugin.Stderr = "token=S3CRET\nlast words"
	p := Pod{
		Kind: "pod", ID: strings.Repeat("ab", 32), Name: "test/web", State: Failed,
		Error: "run sandbox x: cni add: CNI ADD: no address password=S3CRET",
		Rows: []step.Row{
			row("pod", "record", "", 0, 2, ""), row("pod", "cni add", "", 8, 10, "CNI ADD: no address password=S3CRET"),
			row("plugin", "bridge ADD", "cni add", 9, 8, "no address <b>"), ipam,
			row("pod", "end pause", "", 20, 5, ""), row("pod", "cni del", "", 20, 6, "it stays"), row("pod", "remove record", "", 30, 1, ""),
		},
		Network: &Network{Name: "net", Config: []byte(`{"name":"net","password":"S3CRET"}`)},
	}
	p.Finish()
	return p
}

func text(t *testing.T, p Pod, style Style) string {
	var b bytes.Buffer
	harness.Check(t, p.Text(&b, style))
	return b.String()
}

// A plugin is drawn below its step also where the clock puts its beginning after the step's end: the clock is read
// twice there, and the machine was busy in between.
func TestPluginBesideItsStepByTheClock(t *testing.T) {
	p := failedPod()
	p.Rows[2].Start = p.Rows[1].Start.Add(p.Rows[1].Took + time.Millisecond)
	p.Rows[3].Start = p.Rows[2].Start.Add(p.Rows[2].Took + time.Millisecond)
	p.Rows = append(p.Rows[:5], row("pod", "cni del", "", 30, 6, ""), row("plugin", "bridge DEL", "cni del", 40, 3, "it stays"), row("pod", "remove record", "", 50, 1, ""))
	p.Finish()
	got := text(t, p, Style{})
	for _, want := range []string{"  ✗ bridge ADD", "    ✗ host-local ADD", "  ✗ bridge DEL", "NOT undone: cni del: a plugin failed"} {
		harness.Want(t, strings.Contains(got, want), "%q is not in\n%s", want, got)
	}
}

func TestTextOfAFailure(t *testing.T) {
	p := failedPod()
	got := text(t, p, Style{})
	for _, want := range []string{
		"pod test/web: failed after 18ms", "  ✗ bridge ADD", "    ✗ host-local ADD", "exit code 1, CNI error code 11: no address",
		"the pod failed at cni add", "undone: end pause, remove record", "NOT undone: cni del: it stays", "last words",
	} {
		harness.Want(t, strings.Contains(got, want), "%q is not in\n%s", want, got)
	}
	harness.Want(t, !strings.Contains(got, "S3CRET") && !strings.Contains(got, "\x1b"), "a secret, or a colour:\n%s", got)
	for line := range strings.Lines(got) {
		harness.Want(t, utf8.RuneCountInString(strings.TrimRight(line, "\n")) <= width, "too wide: %s", line)
	}
	harness.Want(t, strings.Index(got, "host-local") < strings.Index(got, "end pause"), "the steps are not in order of time")
	harness.Want(t, strings.Contains(text(t, p, Style{Color: true}), "\x1b[31m✗"), "no colour for a terminal")
}

// A DEL whose plugin failed is not undone, even where its step continues.
func TestDELLeftToTheJournal(t *testing.T) {
	p := Pod{Kind: "pod", Error: "x", State: Failed, Rows: []step.Row{
		row("pod", "cni add", "", 0, 1, "no"), row("pod", "cni del", "", 5, 10, ""), row("plugin", "bridge DEL", "cni del", 6, 2, "no"), row("pod", "remove netns", "", 20, 1, ""),
	}}
	p.Finish()
	got := p.Problems()[0]
	harness.Want(t, len(got.NotUndone) == 1 && len(got.Undone) == 1 && got.Undone[0] == "remove netns", "%+v", got)
	p.Rows, p.State = p.Rows[1:], NotReady // after a reboot, which took the rows of its making
	p.Finish()
	harness.Want(t, !strings.Contains(text(t, p, Style{}), "made in") && p.Took == 0, "it took %v", p.Took)
}

// Hours of running are no part of the scale of what was done before and after.
func TestEpisodes(t *testing.T) {
	p := Pod{Kind: "pod", Name: "test/web", State: Removed, Rows: []step.Row{row("pod", "start", "", 0, 5, ""), row("pod", "end pause", "", 3_600_000, 10, "")}}
	ended := row("exit", "ran", "", 5, 3_599_000, "")
	ended.Note = "Completed, exit code 0"
	p.Containers = []Container{{Name: "app", Rows: []step.Row{row("container", "create", "", 2, 3, ""), ended}}}
	p.Finish()
	episodes := p.episodes()
	harness.Need(t, len(episodes) == 2 && len(episodes[0].roots) == 2 && len(episodes[1].roots) == 2 &&
		episodes[1].roots[0].name(whole) == "app: ended", "%d episodes: %s", len(episodes), text(t, p, Style{}))
	got := text(t, p, Style{})
	harness.Want(t, strings.Contains(got, "later") && len(p.Problems()) == 0, "problems: %v\n%s", p.Problems(), got)
}

func TestMatches(t *testing.T) {
	p := Pod{ID: "abcdef", Name: "test/web", Containers: []Container{{ID: "123456", Name: "app"}}}
	for wanted, is := range map[string]bool{"": true, "abc": true, "web": true, "test/web": true, "app": true, "test/web/app": true, "1234": true, "we": false, "other/web": false, "bcd": false} {
		harness.Want(t, p.Matches(wanted) == is, "%q: %v", wanted, !is)
	}
}

func TestListSaysWhyInOneLine(t *testing.T) {
	var b bytes.Buffer
	harness.Check(t, List(&b, []Pod{failedPod()}, noon.Add(time.Hour), Style{}))
	got := b.String()
	harness.Want(t, strings.Contains(got, "60m  ") && strings.Contains(got, "the pod, cni add: CNI ADD: no address") && strings.Count(got, "\n") == 3, "%s", got)
}

// Names that differ at their ends are told apart in every line, which is as wide as the terminal.
func TestTextFitsTheTerminal(t *testing.T) {
	p := Pod{Kind: "pod", ID: strings.Repeat("ab", 32), Name: "test/web", State: Ready, Rows: []step.Row{row("image", "registry.example/team/checkout-frontend:v1", "", 0, 5, "")}}
	for i, name := range []string{"checkout-frontend-web", "checkout-frontend-proxy", "checkout-frontend-production-web", "checkout-frontend-production-proxy"} {
		p.Containers = append(p.Containers, Container{Name: name, ID: strings.Repeat("c", 64), State: "exited (OOMKilled, 137)", Image: "registry.example/team/checkout-frontend:v1", Rows: []step.Row{row("container", "remove rootfs", "", 10*i, 5, "it "+strings.Repeat("fails ", 30))}})
	}
	for _, columns := range []int{0, 40, 60, 80, 120, 200} {
		got := text(t, p, Style{Width: columns})
		uncut := strings.Count(got, "checkout-frontend-production-proxy: remove rootfs  ")
		harness.Want(t, (columns >= 120) == (uncut > 0), "%d columns have %d whole names:\n%s", columns, uncut, got)
		seen := map[string]bool{}
		for line := range strings.Lines(got) {
			if most := max(columns, width*(1-min(columns, 1))); utf8.RuneCountInString(strings.TrimRight(line, "\n")) > most && !strings.Contains(line, p.ID) && !strings.Contains(line, " failed at ") {
				t.Errorf("wider than %d: %s", most, line)
			}
			if name, _, is := strings.Cut(line, ": remove rootfs "); is && strings.Contains(name, "✗") {
				_, name, _ = strings.Cut(name, "✗")
				seen[name] = true
			} else if name, is := strings.CutPrefix(line, "  container  "); is && columns != 40 {
				name, _, _ = strings.Cut(name, " ccc")
				seen["head "+name] = true
			}
		}
		want := 2 * len(p.Containers)
		harness.Want(t, len(seen) == want || columns < 80, "%d columns: %d of %d names differ:\n%s", columns, len(seen), want, got)
	}
}

// A container that was stopped has not failed, whatever its exit code; one that ended before has.
func TestStoppedIsNotFailed(t *testing.T) {
	exit := row("exit", "ran", "", 0, 100, "")
	exit.Note = "Error, exit code 137"
	for at, failed := range map[int]bool{90: false, 110: true} {
		p := &Pod{Kind: "pod", Containers: []Container{{Name: "app", Rows: []step.Row{exit, row("container", "kill", "", at, 10, "")}}}}
		harness.Want(t, (len(p.Problems()) > 0) == failed, "stopped at %d, ended at 100: %v", at, p.Problems())
	}
}

// What is named last is what the time is of.
func TestSlowestHasItsOwnTime(t *testing.T) {
	p := &Pod{Kind: "pod", Rows: []step.Row{row("pod", "cni add", "", 0, 188, ""), row("plugin", "bridge ADD", "cni add", 5, 170, "")}}
	p.Rows[1].Plugin = &step.Plugin{Name: "bridge", Verb: "ADD"}
	text := p.episodes()[0].slowest()
	harness.Want(t, strings.HasPrefix(text, "cni add > bridge ADD took 170ms of 188ms"), "%v", text)
}
