package timeline

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/docker/go-units"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/minicri/minicri/internal/redact"
)

// Glance is a node in a few lines: its pods, and the runtime's memory.
type Glance struct {
	At          time.Time `json:"at"`
	Pods        []Line    `json:"pods"`
	Daemon      uint64    `json:"daemonBytes"`
	Supervisors uint64    `json:"supervisorBytes"`
	Released    int       `json:"releasedAttachments"` // those that wait for DEL and have no pod
	Older       []Older   `json:"olderSupervisors,omitempty"`
}

// Older is a supervisor of another build, which serves the pods that were made with it.
type Older struct {
	Build   string `json:"build"`
	Version string `json:"version"`
	Pods    int    `json:"pods"`
	Problem string `json:"problem,omitempty"`
}

// Line is one pod of a glance. For is how long its Stage, the step under way, has taken.
type Line struct {
	ID         string        `json:"id"`
	Name       string        `json:"name"`
	State      string        `json:"state"`
	Created    time.Time     `json:"created,omitzero"`
	Stage      string        `json:"stage,omitempty"`
	For        time.Duration `json:"for,omitempty"`
	Addresses  []string      `json:"addresses,omitempty"`
	Running    int           `json:"running"`
	Containers int           `json:"containers"`   // the newest of each name, without those that have completed
	Memory     uint64        `json:"memoryBytes"`  // the working set
	Runtime    uint64        `json:"runtimeBytes"` // the pause process, and a share of the supervisor
	CPU        uint64        `json:"cpuNanoseconds"`
	Received   uint64        `json:"receivedBytes"`
	Sent       uint64        `json:"sentBytes"`
	Problems   []string      `json:"problems,omitempty"` // of the attachment
}

// Style is for a terminal of so many columns and lines, 0 for no limit. Wide lists have all that is known.
type Style struct {
	Color         bool
	Width, Height int
	Wide          bool
}

const (
	red    = "31"
	green  = "32"
	yellow = "33"
	faint  = "2"
	bold   = "1"
)

var colors = map[string]string{Ready: green, NotReady: red, Failed: red, Building: yellow}

func (s Style) paint(color, text string) string {
	if !s.Color || text == "" || color == "" {
		return text
	}
	return "\x1b[" + color + "m" + text + "\x1b[0m"
}

func (s Style) line(color, text string) string {
	return s.paint(color, shorten(oneLine(text), s.room(0)))
}

func (s Style) room(used int) int {
	if s.Width == 0 {
		return 1 << 20
	}
	return max(0, s.Width-used)
}

type cell struct{ text, color string }

func cells(color string, texts ...string) (row []cell) {
	for _, text := range texts {
		row = append(row, cell{text, color})
	}
	return row
}

// table lays out columns. That of names gives way to the others, down to 12 letters.
func (s Style) table(rows [][]cell, names int) (lines []string) {
	widths, all := make([]int, len(rows[0])), 0
	for _, row := range rows {
		for i, c := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(c.text))
		}
	}
	for _, width := range widths {
		all += width + 2
	}
	if over := all - 2 - s.room(0); over > 0 {
		widths[names] = max(12, widths[names]-over)
	}
	for _, row := range rows {
		line, used := "", 0
		for i, c := range row {
			text := middle(c.text, widths[i])
			if i < len(row)-1 {
				text += strings.Repeat(" ", widths[i]+2-utf8.RuneCountInString(text))
			}
			text = shorten(text, s.room(used))
			line, used = line+s.paint(c.color, text), used+utf8.RuneCountInString(text)
		}
		lines = append(lines, line)
	}
	return lines
}

// Table writes one line for each pod, with the rates since an earlier glance, and no more than fit the height.
func (g *Glance) Table(w io.Writer, earlier *Glance, style Style) error {
	if style.Wide && style.Height == 0 {
		style.Width = 0
	}
	head, rates := []string{"ID", "NAME", "STATE", "AGE", "CTRS", "MEMORY"}, []string{"CPU", "IN", "OUT"}
	if style.Wide {
		head = append(head, "RUNTIME")
	}
	before := make(map[string]Line)
	if earlier == nil {
		rates = nil
	} else {
		for _, l := range earlier.Pods {
			before[l.ID] = l
		}
		if style.Width > 0 && style.Width <= 100 {
			rates = rates[:1]
		}
	}
	rows, pods := [][]cell{cells(faint, slices.Concat(head, rates, []string{"ADDRESSES"})...)}, redact.Lines(g.Pods)
	for _, l := range pods {
		row := l.row(g.At, style.Wide)
		if earlier != nil {
			row = append(row, cells("", l.rates(before[l.ID], g.At.Sub(earlier.At))[:len(rates)]...)...)
		}
		rows = append(rows, append(row, cell{text: strings.Join(l.Addresses, ",")}))
	}
	lines, foot := style.table(rows, 1), g.foot(style)
	body := lines[:1:1]
	for i, l := range pods {
		body = append(body, lines[i+1])
		for _, problem := range l.Problems {
			body = append(body, "  "+style.paint(red, shorten(oneLine(problem), style.room(2))))
		}
	}
	if style.Height > 0 { // the cursor takes a line too
		foot = foot[:min(len(foot), max(1, style.Height/3))]
		if room := max(1, style.Height-1-len(foot)); len(body) > room {
			more := fmt.Sprintf("and %d lines more, for which the screen has no room", len(body)-room+1)
			body = append(body[:room-1], style.line(faint, more))
		}
	}
	_, err := io.WriteString(w, strings.Join(append(body, foot...), "\n")+"\n")
	return err
}

func (l *Line) row(now time.Time, wide bool) []cell {
	id, state := l.ID, cell{l.State, colors[l.State]}
	if l.Stage != "" {
		state = cell{l.Stage + " " + short(l.For), yellow}
	}
	if !wide {
		id = id[:min(12, len(id))]
	}
	row := append(cells("", id, l.Name), state)
	row = append(row, cells("", age(l.Created, now), fmt.Sprintf("%d/%d", l.Running, l.Containers), size(l.Memory))...)
	if wide {
		row = append(row, cell{text: size(l.Runtime)})
	}
	return row
}

// rates are CPU, received and sent for each second since an earlier glance.
func (l *Line) rates(before Line, since time.Duration) []string {
	if before.ID == "" || since <= 0 {
		return []string{"-", "-", "-"}
	}
	rate := func(now, then uint64) float64 { return float64(now-min(now, then)) / since.Seconds() }
	return []string{
		fmt.Sprintf("%.1f%%", rate(l.CPU, before.CPU)/1e7),
		size(uint64(rate(l.Received, before.Received))) + "/s", size(uint64(rate(l.Sent, before.Sent))) + "/s",
	}
}

func (g *Glance) foot(style Style) []string {
	lines := []string{style.line(faint, fmt.Sprintf("%s; daemon %s, supervisors %s", count(len(g.Pods), "pod"), size(g.Daemon), size(g.Supervisors)))}
	if g.Released > 0 {
		lines = append(lines, style.line(yellow, fmt.Sprintf("pods that are gone have %s waiting for a DEL: minicri timeline --failed", count(g.Released, "attachment"))))
	}
	if !style.Wide {
		return lines
	}
	for _, o := range redact.Lines(g.Older) {
		lines = append(lines, style.line("", fmt.Sprintf("supervisor of build %s, version %s: %s", o.Build, o.Version, count(o.Pods, "pod"))))
		if o.Problem != "" {
			lines = append(lines, style.line(red, "it cannot be asked: "+o.Problem))
		}
	}
	return lines
}

// List writes one line for each pod, and one for each of its problems.
func List(w io.Writer, pods []Pod, now time.Time, style Style) error {
	rows := [][]cell{cells(faint, "ID", "AGE", "TOOK", "STATE", "NAME")}
	pods = redact.Lines(pods)
	for _, p := range pods {
		name := p.Name + attempt(p.Attempt)
		if p.Kind != "pod" {
			name = p.Kind + " " + name
		}
		rows = append(rows, append(cells("", p.ID[:min(12, len(p.ID))], age(p.Begin, now), short(p.Took)), cell{p.State, colors[p.State]}, cell{text: name}))
	}
	lines := style.table(rows, 4)
	var b strings.Builder
	fmt.Fprintln(&b, lines[0])
	for i, p := range pods {
		fmt.Fprintln(&b, lines[i+1])
		for _, problem := range p.Problems() {
			at := problem.Of
			if problem.Step != "" {
				at += ", " + problem.Step
			}
			if style.Width == 0 { // a pipe or a file gets all of it, in one line
				fmt.Fprintf(&b, "  %s: %s\n", at, oneLine(problem.Text))
				continue
			}
			style.wrapIn(&b, red, "  ", at+": "+problem.Text)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func attempt(n uint32) (suffix string) {
	if n > 0 {
		suffix = fmt.Sprintf(" (attempt %d)", n)
	}
	return suffix
}

func count(number int, thing string) string {
	if number != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", number, thing)
}

func size(bytes uint64) string {
	if bytes == 0 {
		return "-"
	}
	return units.CustomSize("%.3g %s", float64(bytes), 1024, []string{"B", "KiB", "MiB", "GiB", "TiB"})
}

func age(at, now time.Time) string {
	if at.IsZero() {
		return "-"
	}
	return duration.HumanDuration(now.Sub(at))
}

// short rounds a duration to about three digits.
func short(d time.Duration) string {
	digits := time.Duration(1)
	for d/digits >= 1000 {
		digits *= 10
	}
	return max(0, d).Round(digits).String()
}

func shorten(text string, most int) string {
	letters := []rune(text)
	if len(letters) <= most {
		return text
	}
	if most < 1 {
		return ""
	}
	return string(letters[:most-1]) + "…"
}

// middle cuts letters from the middle of a text: names of pods differ at their ends.
func middle(text string, most int) string {
	letters := []rune(text)
	if len(letters) <= most || most < 3 {
		return text
	}
	end := (most - 1) * 2 / 3
	return string(letters[:most-1-end]) + "…" + string(letters[len(letters)-end:])
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
