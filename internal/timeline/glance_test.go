package timeline

import (
	"strings"
	"testing"
	"time"
)

// With an earlier glance each line has what its pod has used each second since
// then; a pod that was not there has none, and counters that begin again, as those
// of a restarted pod, give no rate below zero.
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
	if err := now.Table(&text, earlier, Style{}); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(text.String(), "\n")
	for i, want := range [][]string{{"CPU", "IN", "OUT"}, {"busy", " 50.0% ", " 2 MiB/s ", " 2 KiB/s"}, {"restarted", " 0.0% ", " -/s "}, {"new", " - "}} {
		for _, part := range want {
			if !strings.Contains(lines[i], part) {
				t.Errorf("line %d lacks %q: %q", i, part, lines[i])
			}
		}
	}
	text.Reset()
	if err := now.Table(&text, nil, Style{}); err != nil || strings.Contains(text.String(), "/s") {
		t.Errorf("without an earlier glance: %v\n%s", err, text.String())
	}
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
		if err := g.Table(&b, nil, style); err != nil {
			t.Fatal(err)
		}
		return strings.Split(strings.TrimSpace(b.String()), "\n")
	}
	lines := table(Style{Width: 80})
	for i, end := range []string{"aaaaa", "bbbbb", "ccccc"} {
		if line := lines[i+1]; len([]rune(line)) > 80 || !strings.Contains(line, "…") || !strings.Contains(line, "b8b-"+end) || !strings.Contains(line, " 3h ") || !strings.HasPrefix(line, strings.Repeat(end[:1], 12)) {
			t.Errorf("%d columns: %q", len([]rune(line)), line)
		}
	}
	if lines := table(Style{}); !strings.Contains(lines[1], g.Pods[0].Name) {
		t.Errorf("for a program: %q", lines[1])
	}
	if lines := table(Style{Wide: true, Width: 80}); !strings.Contains(lines[1], g.Pods[0].Name) || !strings.Contains(lines[1], g.Pods[0].ID) || !strings.Contains(lines[0], "RUNTIME") {
		t.Errorf("wide: %q", lines)
	}
	if lines := table(Style{Width: 80, Height: 6}); len(lines) > 6 || !strings.Contains(lines[3], "and 1 more") {
		t.Errorf("on six lines: %q", lines)
	}
}
