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
