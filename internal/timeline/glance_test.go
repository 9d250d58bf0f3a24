package timeline

import (
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/minicri/minicri/test/harness"
)

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
			if more := strings.Contains(shown, " lines more, for which"); style.Height == 24 && !more || style.Height == 200 && more {
				t.Errorf("%+v says that there are more: %v\n%s", style, more, shown)
			}
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
