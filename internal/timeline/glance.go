package timeline

import (
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/docker/go-units"
)

// Glance is a node in a few lines: its pods, and what the runtime takes.
type Glance struct {
	// At is when it was taken.
	At   time.Time `json:"at"`
	Pods []Line    `json:"pods"`
	// Daemon and Supervisors are the memory of the runtime's processes, in bytes.
	Daemon      uint64 `json:"daemonBytes"`
	Supervisors uint64 `json:"supervisorBytes"`
	// Released are attachments that wait for their DEL and have no pod any more.
	Released int `json:"releasedAttachments"`
	// Older are the supervisors of other builds.
	Older []Older `json:"olderSupervisors,omitempty"`
}

// Older is a supervisor of another build, which serves the pods that were made with it.
type Older struct {
	Build   string `json:"build"`
	Version string `json:"version"`
	Pods    int    `json:"pods"`
	Problem string `json:"problem,omitempty"`
}

// Line is one pod of a glance.
type Line struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	State string `json:"state"`
	// Created is when the pod was made.
	Created time.Time `json:"created,omitzero"`
	// Stage is the step that is under way, and For how long it has been; "" if
	// there is none.
	Stage string        `json:"stage,omitempty"`
	For   time.Duration `json:"for,omitempty"`

	Addresses []string `json:"addresses,omitempty"`
	// Running of the pod's Containers run.
	Running    int `json:"running"`
	Containers int `json:"containers"`
	// Memory is the working set of the pod, Runtime what the runtime takes for
	// it: its pause process, and its share of the supervisor. In bytes.
	Memory  uint64 `json:"memoryBytes"`
	Runtime uint64 `json:"runtimeBytes"`
	// CPU is the time that it has run, in nanoseconds; Received and Sent are
	// bytes of its network.
	CPU      uint64 `json:"cpuNanoseconds"`
	Received uint64 `json:"receivedBytes"`
	Sent     uint64 `json:"sentBytes"`
	// Problems are those of its attachment.
	Problems []string `json:"problems,omitempty"`
}

// Table writes one line for each pod; with an earlier glance also the rates
// since then. Of a style with a height the lines that fit are written.
func (g *Glance) Table(w io.Writer, earlier *Glance, style Style) error {
	pods, foot := printable(g.Pods), g.foot(style)
	c := columnsOf(pods, earlier != nil, style)
	lines := []string{c.head(style)}
	if style.Height > 0 {
		foot = foot[:min(len(foot), max(1, style.Height/3))] // pods come first
	}
	room, all := style.Height-1-len(lines)-len(foot), 0 // the cursor has a line, too
	for _, l := range pods {
		all += 1 + len(l.Problems)
	}
	if style.Height <= 0 {
		room = all
	} else if all > room {
		room-- // for that of how many there are
	}
	for i, l := range pods {
		if room <= 0 {
			lines = append(lines, style.paint(faint, fmt.Sprintf("and %d more, for which the screen has no lines", len(pods)-i)))
			break
		}
		of := append([]string{c.row(l, age(l.Created, g.At), g.rates(l, earlier, c), style)}, l.problems(style)...)
		of = of[:min(len(of), room)]
		lines, room = append(lines, of...), room-len(of)
	}
	lines = append(lines, foot...)
	if style.Height > 0 {
		lines = lines[:min(len(lines), max(1, style.Height-1))]
	}
	for i, line := range lines {
		if style.Height > 0 || !style.Wide {
			line = style.clip(line)
		}
		lines[i] = line + "\n"
	}
	_, err := io.WriteString(w, strings.Join(lines, ""))
	return err
}

// foot are the lines below those of the pods: what is on the node, and of a wide table
// the supervisors of other builds.
func (g *Glance) foot(style Style) []string {
	lines := []string{style.paint(faint, fmt.Sprintf("%s; daemon %s, supervisors %s", count(len(g.Pods), "pod"), size(g.Daemon), size(g.Supervisors)))}
	if g.Released > 0 {
		lines = append(lines, style.paint(yellow, fmt.Sprintf("pods that are gone have %s waiting for a DEL: minicri timeline --failed", count(g.Released, "attachment"))))
	}
	if !style.Wide {
		return lines
	}
	for _, o := range printable(g.Older) {
		lines = append(lines, fmt.Sprintf("supervisor of build %s, version %s: %s", o.Build, o.Version, count(o.Pods, "pod")))
		if o.Problem != "" {
			lines = append(lines, "  "+style.paint(red, oneLine(o.Problem)))
		}
	}
	return lines
}

// columns are how wide those of a table are, and which it has.
type columns struct {
	ids, names, states   int
	wide, rates, network bool // network: the rates of the network, too
}

// columnsOf leaves out of a terminal's table what it has no room for beside the
// addresses: the rates of the network first, then the middles of names.
func columnsOf(pods []Line, rates bool, style Style) columns {
	c := columns{ids: 12, names: len("NAME"), states: 14, wide: style.Wide, rates: rates, network: rates}
	addresses, states := len("ADDRESSES"), len("STATE")
	for _, l := range pods {
		c.names = max(c.names, utf8.RuneCountInString(l.Name))
		addresses = max(addresses, utf8.RuneCountInString(strings.Join(l.Addresses, ",")))
		states = max(states, utf8.RuneCountInString(l.state()))
	}
	if c.wide {
		c.ids = 64
	}
	if style.Width == 0 {
		return c
	}
	c.states = min(c.states, states)
	left := func() int { return style.Width - len(c.head(Style{})) + c.names + len("ADDRESSES") - addresses }
	c.network = rates && left() >= min(c.names, 20)
	if !c.wide {
		c.names = min(c.names, max(12, left()))
	}
	return c
}

func (c columns) head(style Style) string {
	head := fmt.Sprintf("%s %s %s %4s %5s %9s", pad("ID", c.ids), pad("NAME", c.names), pad("STATE", c.states), "AGE", "CTRS", "MEMORY")
	if c.wide {
		head += fmt.Sprintf(" %8s", "RUNTIME")
	}
	if c.rates {
		head += fmt.Sprintf(" %6s", "CPU")
	}
	if c.network {
		head += fmt.Sprintf(" %10s %10s", "IN", "OUT")
	}
	return style.paint(faint, head+"  ADDRESSES")
}

func (c columns) row(l Line, age, rates string, style Style) string {
	color := map[string]string{Ready: green, NotReady: red}[l.State]
	if l.Stage != "" {
		color = yellow
	}
	row := fmt.Sprintf("%s %s %s %4s %5s %9s", pad(l.ID[:min(c.ids, len(l.ID))], c.ids), pad(middle(l.Name, c.names), c.names),
		style.paint(color, pad(l.state(), c.states)), age, fmt.Sprintf("%d/%d", l.Running, l.Containers), size(l.Memory))
	if c.wide {
		row += fmt.Sprintf(" %8s", size(l.Runtime))
	}
	return row + rates + "  " + strings.Join(l.Addresses, ",")
}

// state is that of the pod, or the step that is under way.
func (l Line) state() string {
	if l.Stage != "" {
		return fmt.Sprintf("%s %s", l.Stage, short(l.For))
	}
	return l.State
}

func (l Line) problems(style Style) (lines []string) {
	for _, problem := range l.Problems {
		lines = append(lines, "  "+style.paint(red, shorten(oneLine(problem), style.columns()-2)))
	}
	return lines
}

// count is a number of things: "1 pod", "2 pods".
func count(number int, thing string) string {
	if number != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", number, thing)
}

// rates are what the pod has used each second since an earlier glance.
func (g *Glance) rates(l Line, earlier *Glance, c columns) string {
	if earlier == nil {
		return ""
	}
	cpu, in, out := "-", "-", "-"
	seconds := g.At.Sub(earlier.At).Seconds()
	for _, before := range earlier.Pods {
		if before.ID != l.ID || seconds <= 0 {
			continue
		}
		rate := func(now, then uint64) float64 { return float64(now-min(now, then)) / seconds }
		cpu = fmt.Sprintf("%.1f%%", rate(l.CPU, before.CPU)/1e7)
		in, out = size(uint64(rate(l.Received, before.Received)))+"/s", size(uint64(rate(l.Sent, before.Sent)))+"/s"
		break
	}
	if !c.network {
		return fmt.Sprintf(" %6s", cpu)
	}
	return fmt.Sprintf(" %6s %10s %10s", cpu, in, out)
}

func size(bytes uint64) string {
	if bytes == 0 {
		return "-"
	}
	return units.CustomSize("%.3g %s", float64(bytes), 1024, []string{"B", "KiB", "MiB", "GiB", "TiB"})
}
