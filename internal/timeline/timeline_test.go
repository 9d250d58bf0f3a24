package timeline

import (
	"bytes"
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"
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
	harness.Need(t, len(got.NotUndone) == 1 && len(got.Undone) == 1, "%+v", got)
	harness.Want(t, got.Undone[0] == "remove netns", "%+v", got)
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
	harness.Need(t, len(episodes) == 2 && len(episodes[0].roots) == 2,
		"%d episodes: %s", len(episodes), text(t, p, Style{}))
	harness.Need(t, len(episodes[1].roots) == 2, "%d episodes: %s", len(episodes), text(t, p, Style{}))
	harness.Need(t, episodes[1].roots[0].name(whole) == "app: ended",
		"%d episodes: %s", len(episodes), text(t, p, Style{}))
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
	harness.Want(t, strings.Contains(got, "60m  "), "%s", got)
	harness.Want(t, strings.Contains(got, "the pod, cni add: CNI ADD: no address"), "%s", got)
	harness.Want(t, strings.Count(got, "\n") == 3, "%s", got)
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
	text, _ := p.episodes()[0].slowest()
	harness.Want(t, strings.HasPrefix(text, "cni add > bridge ADD took 170ms of 188ms"), "%v", text)
}

// With an earlier glance each line has what its pod has used each second since then; a pod that was not there has
// none, and counters that begin again, as those of a restarted pod, give no rate below zero.
func TestRatesOfAGlance(t *testing.T) {
	at := time.Unix(1000, 0)
	earlier := &Glance{At: at, Pods: []Line{
		{ID: "a", Name: "busy", CPU: 1e9, Received: 1 << 20, Sent: 0},
		{ID: "b", Name: "restarted", CPU: 9e9, Received: 9 << 20, Sent: 9 << 20},
	}}
	now := &Glance{At: at.Add(2 * time.Second), Pods: []Line{
		{ID: "a", Name: "busy", CPU: 2e9, Received: 5 << 20, Sent: 4 << 10},
		{ID: "b", Name: "restarted", CPU: 1e9, Received: 1 << 20, Sent: 1 << 20},
		{ID: "c", Name: "new", CPU: 7e9},
	}}
	var text strings.Builder
	harness.Check(t, now.Table(&text, earlier, Style{}))
	lines := strings.Split(text.String(), "\n")
	for i, want := range [][]string{{"CPU", "IN", "OUT"}, {"busy", " 50.0% ", " 2 MiB/s ", " 2 KiB/s"}, {"restarted", " 0.0% ", " -/s "}, {"new", " - "}} {
		for _, part := range want {
			harness.Want(t, strings.Contains(lines[i], part), "line %d lacks %q: %q", i, part, lines[i])
		}
	}
	text.Reset()
	err := now.Table(&text, nil, Style{})
	harness.Want(t, err == nil && !strings.Contains(text.String(), "/s"), "without an earlier glance: %v\n%s", err, text.String())
}

// Replicas differ at the ends of their names; a table is as wide as the terminal and as
// long as the screen, and where it goes to a program names are whole.
func TestTableFitsTheTerminal(t *testing.T) {
	at := time.Unix(100000, 0)
	g := &Glance{At: at}
	for _, end := range []string{"aaaaa", "bbbbb", "ccccc"} {
		g.Pods = append(g.Pods, Line{ID: strings.Repeat(end[:1], 64), Name: "production/checkout-frontend-7f9c6d5b8b-" + end, State: Ready, Created: at.Add(-3 * time.Hour), Addresses: []string{"10.88.0.2"}})
	}
	table := func(style Style) []string {
		var b strings.Builder
		harness.Check(t, g.Table(&b, nil, style))
		return strings.Split(strings.TrimSpace(b.String()), "\n")
	}
	lines := table(Style{Width: 80})
	for i, end := range []string{"aaaaa", "bbbbb", "ccccc"} {
		if line := lines[i+1]; len([]rune(line)) > 80 || !strings.Contains(line, "…") || !strings.Contains(line, "b8b-"+end) || !strings.Contains(line, " 3h ") || !strings.HasPrefix(line, strings.Repeat(end[:1], 12)) {
			t.Errorf("%d columns: %q", len([]rune(line)), line)
		}
	}
	lines = table(Style{})
	harness.Want(t, strings.Contains(lines[1], g.Pods[0].Name), "for a program: %q", lines[1])
	if lines := table(Style{Wide: true, Width: 80}); !strings.Contains(lines[1], g.Pods[0].Name) || !strings.Contains(lines[1], g.Pods[0].ID) || !strings.Contains(lines[0], "RUNTIME") {
		t.Errorf("wide: %q", lines)
	}
	lines = table(Style{Width: 80, Height: 5})
	harness.Want(t, len(lines) == 4 && strings.Contains(lines[2], "and 2 lines more"), "on five lines: %q", lines)
}

// Whatever the node has, what is looked at again and again is as large as the screen, in
// colours too; addresses are whole, and names are told apart.
func TestWatchFitsTheScreen(t *testing.T) {
	at := time.Unix(100000, 0)
	g, earlier := &Glance{At: at, Released: 3}, &Glance{At: at.Add(-2 * time.Second)}
	for i := range 40 {
		id := fmt.Sprintf("%064d", i)
		g.Pods = append(g.Pods, Line{ID: id, Name: fmt.Sprintf("production/checkout-frontend-7f9c6d5b8b-x%03d", i), State: Ready, Created: at.Add(-3 * time.Hour), Addresses: []string{"10.244.100.150"}, Received: 1 << 30, CPU: 1e9})
		earlier.Pods = append(earlier.Pods, Line{ID: id})
		if i%4 == 1 {
			g.Pods[i].Problems = []string{strings.Repeat("the plugin fails ", 20), "and again"}
		}
		g.Older = append(g.Older, Older{Build: "1234", Version: "0.1.0", Pods: 1, Problem: strings.Repeat("it hangs ", 40)})
	}
	for _, style := range []Style{
		{Width: 80, Height: 24},
		{Width: 120, Height: 24},
		{Width: 80, Height: 24, Color: true},
		{Width: 80, Height: 3},
		{Width: 80, Height: 200},
		{Width: 80, Height: 24, Wide: true},
		{Width: 200, Height: 100, Wide: true, Color: true},
		{Width: 30, Height: 5},
	} {
		for _, before := range []*Glance{nil, earlier} {
			var b strings.Builder
			harness.Check(t, g.Table(&b, before, style))
			shown := marks.ReplaceAllString(b.String(), "")
			harness.Want(t, !strings.Contains(shown, "\x1b") && strings.Count(shown, "\n") < style.Height,
				"%+v has %d lines:\n%s", style, strings.Count(shown, "\n"), shown)
			for i, line := range strings.Split(shown, "\n") {
				harness.Want(t, utf8.RuneCountInString(line) <= style.Width,
					"%+v: line %d has %d columns: %q", style, i, utf8.RuneCountInString(line), line)
			}
			if row := strings.Split(shown, "\n")[1]; style.Width >= 80 && style.Height == 24 && !style.Wide && (!strings.HasSuffix(row, "  10.244.100.150") || !strings.Contains(row, "b-x000 ")) {
				t.Errorf("%+v: %q", style, row)
			}
			harness.Want(t, style.Height != 24 || strings.Contains(shown, "b-x006 ") || strings.Contains(shown, g.Pods[6].ID),
				"%+v has few pods:\n%s", style, shown)
			network := strings.Contains(shown, " OUT ")
			harness.Want(t, network == (before != nil && style.Width > 80 && style.Height > 5), "%+v has rates of the network: %v", style, network)
			more := strings.Contains(shown, " lines more, for which")
			harness.Want(t, style.Height != 24 || more, "%+v says that there are more: %v\n%s", style, more, shown)
			harness.Want(t, style.Height != 200 || !more, "%+v says that there are more: %v\n%s", style, more, shown)
		}
	}
}

// marks are the sequences that this package writes itself.
var marks = regexp.MustCompile("\x1b\\[(0|1|2|31|32|33)m")

// FuzzTerminal puts a text wherever there is one in what is shown.
func FuzzTerminal(f *testing.F) {
	for _, text := range []string{"\x1b]0;PWNED\x07", "\u009b31m", "\xff\x1b[2J", "a\rb\bc", "\u202etxt.exe", "a\nb\tc", "\x1b[31m"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, style := range []Style{{}, {Color: true}, {Width: 80, Height: 24}, {Color: true, Width: 30, Height: 5, Wide: true}} {
			shown := shownOf(t, text, style)
			if style.Color {
				shown = marks.ReplaceAllString(shown, "")
			}
			for _, r := range shown {
				harness.Need(t, r == '\n' || unicode.IsPrint(r), "%q is shown of %q", r, text)
			}
			// A text makes no rows of its own.
			if spaced := strings.ReplaceAll(text, "\n", " "); spaced != text && shownOf(t, spaced, Style{Width: style.Width, Height: style.Height, Wide: style.Wide}) != shown {
				t.Errorf("%q is shown with its lines:\n%s", text, shown)
			}
		}
	})
}

// shownOf is what is shown of things that have a text everywhere.
func shownOf(t *testing.T, text string, style Style) string {
	var pod Pod
	fillTexts(reflect.ValueOf(&pod).Elem(), text)
	glance := Glance{Pods: make([]Line, 1)}
	fillTexts(reflect.ValueOf(&glance).Elem(), text)
	var b strings.Builder
	for _, err := range []error{pod.Text(&b, style), List(&b, []Pod{pod}, time.Now(), style), glance.Table(&b, &glance, style)} {
		harness.Check(t, err)
	}
	harness.Want(t, text == "" || pod.Name == text, "the pod has changed: %q", pod.Name)
	return b.String()
}

// fillTexts sets every text in a value, and makes one of each that there can be any number of.
func fillTexts(value reflect.Value, text string) {
	switch value.Kind() {
	case reflect.String:
		value.SetString(text)
	case reflect.Struct:
		for i := range value.NumField() {
			if value.Type().Field(i).IsExported() {
				fillTexts(value.Field(i), text)
			}
		}
	case reflect.Pointer:
		value.Set(reflect.New(value.Type().Elem()))
		fillTexts(value.Elem(), text)
	case reflect.Slice:
		if value.Type().Elem().Kind() != reflect.Uint8 {
			value.Set(reflect.MakeSlice(value.Type(), 1, 1))
			fillTexts(value.Index(0), text)
		}
	case reflect.Map:
		entry := reflect.New(value.Type().Elem()).Elem()
		fillTexts(entry, text)
		value.Set(reflect.MakeMap(value.Type()))
		value.SetMapIndex(reflect.ValueOf(text).Convert(value.Type().Key()), entry)
	}
}

// A step under way is neither done nor failed.
func TestRunningStep(t *testing.T) {
	p := Pod{Kind: "pod", Name: "test/web", State: Building, Rows: []step.Row{row("pod", "record", "", 0, 5, ""), row("pod", "cni add", "", 5, 2500, "")}}
	p.Rows[1].Running = true
	p.Finish()
	got := text(t, p, Style{})
	for _, want := range []string{"pod test/web: being made for 2.5", "✓ record", "… cni add"} {
		harness.Want(t, strings.Contains(got, want), "%q is not in\n%s", want, got)
	}
	events := Events([]Pod{p})
	harness.Same(t, "ended steps", len(events), 1)
	harness.Want(t, strings.HasSuffix(events[0].Text(Style{}), " test/web ✓ record 5ms"), "%q", events[0].Text(Style{}))
}

// A cause is whole in a pipe, in one line; on a terminal it is wrapped.
func TestCausesAreWhole(t *testing.T) {
	p := failedPod()
	p.Error = "cni add: " + strings.Repeat("far ", 60) + "END"
	for _, columns := range []int{0, 60} {
		var b strings.Builder
		harness.Check(t, List(&b, []Pod{p}, noon.Add(time.Hour), Style{Width: columns}))
		harness.Want(t, strings.Contains(b.String(), "END\n"), "%d columns cut the cause:\n%s", columns, b.String())
		harness.Same(t, "the cause is in one line", strings.Contains(b.String(), "far far far END\n") && strings.Count(b.String(), "far ") == 60 &&
			!strings.Contains(b.String(), "far\n"), columns == 0)
	}
}

// The page has all that the text has, and no text of a pod becomes markup or ends its script.
func TestPage(t *testing.T) {
	p := failedPod()
	p.Name = "test/</script><img src=x onerror=alert(1)>"
	var b strings.Builder
	harness.Check(t, HTML(&b, []Pod{p}, "0.1.0"))
	page := b.String()
	harness.Same(t, "scripts that end", strings.Count(page, "</script>"), 2)
	for _, want := range []string{"no address", `"name":"bridge ADD"`, `\u003cimg`, `"notUndone":["cni del: it stays"]`} {
		harness.Want(t, strings.Contains(page, want), "%q is not in the page", want)
	}
	for _, bad := range []string{"http://", "https://", "S3CRET", "<img", "src="} {
		harness.Want(t, !strings.Contains(strings.ReplaceAll(page, "src=x", ""), bad), "%q is in the page", bad)
	}
}
