package timeline

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Event is one row of a pod or a container that has ended.
type Event struct {
	At   time.Time // the end
	Pod  string
	line *line
}

// Events returns the ended rows of pods, by time.
func Events(pods []Pod) (all []Event) {
	for _, p := range pods {
		for _, e := range p.episodes() {
			for _, l := range e.lines {
				if !l.Running {
					all = append(all, Event{At: end(l.Row), Pod: p.Name, line: l})
				}
			}
		}
	}
	slices.SortStableFunc(all, func(a, b Event) int { return a.At.Compare(b.At) })
	return all
}

// Key identifies the event among all events of a node.
func (e Event) Key() string {
	return fmt.Sprint(e.Pod, "\x00", e.line.name(whole), "\x00", e.line.Kind, "\x00", e.line.Start.UnixNano())
}

// Text is one line: time, pod, result, step, duration and details.
func (e Event) Text(style Style) string {
	sign, color := e.line.mark()
	at, details := e.At.UTC().Format("15:04:05.000"), oneLine(strings.Join(e.line.details(), "; "))
	text := fmt.Sprintf("%s %s %s %s %s", at, e.Pod, style.paint(color, sign), e.line.name(whole), short(e.line.Took))
	return strings.TrimSuffix(text+": "+details, ": ")
}
