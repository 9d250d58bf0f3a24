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

// TableOfOlder writes one line for each supervisor of another build.
func (g *Glance) TableOfOlder(w io.Writer, style Style) error {
	var b strings.Builder
	for _, o := range g.Older {
		fmt.Fprintf(&b, "supervisor of build %s, version %s: %s\n", o.Build, o.Version, count(o.Pods, "pod"))
		if o.Problem != "" {
			fmt.Fprintf(&b, "  %s\n", style.paint(red, oneLine(o.Problem)))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
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
	var b strings.Builder
	pods := printable(g.Pods)
	names, left := len("NAME"), 0
	for _, l := range pods {
		names = max(names, utf8.RuneCountInString(l.Name))
	}
	if style.Height > 0 {
		shown := min(len(pods), max(1, style.Height-4))
		pods, left = pods[:shown], len(pods)-shown
	}
	head := fmt.Sprintf(" %-14s %4s %5s %9s", "STATE", "AGE", "CTRS", "MEMORY")
	if style.Wide {
		head += fmt.Sprintf(" %8s", "RUNTIME")
	}
	if earlier != nil {
		head += fmt.Sprintf(" %6s %10s %10s", "CPU", "IN", "OUT")
	}
	ids := 12
	if style.Wide {
		ids = 64
	}
	if style.Width > 0 && !style.Wide {
		names = min(names, max(20, style.Width-ids-1-len(head)-2-len("ADDRESSES")-4))
	}
	fmt.Fprintf(&b, "%s  %s\n", style.paint(faint, pad("ID", ids)+" "+pad("NAME", names)+head), style.paint(faint, "ADDRESSES"))
	for _, l := range pods {
		fmt.Fprintf(&b, "%s %s", pad(l.ID[:min(ids, len(l.ID))], ids), pad(middle(l.Name, names), names))
		l.write(&b, age(l.Created, g.At), g.rates(l, earlier), style)
	}
	if left > 0 {
		fmt.Fprintf(&b, "%s\n", style.paint(faint, fmt.Sprintf("and %d more, for which the screen has no lines", left)))
	}
	fmt.Fprintf(&b, "%s\n", style.paint(faint, fmt.Sprintf("%s; daemon %s, supervisors %s", count(len(g.Pods), "pod"), size(g.Daemon), size(g.Supervisors))))
	if g.Released > 0 {
		fmt.Fprintf(&b, "%s\n", style.paint(yellow, fmt.Sprintf("pods that are gone have %s waiting for a DEL: minicri timeline --failed", count(g.Released, "attachment"))))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// count is a number of things: "1 pod", "2 pods".
func count(number int, thing string) string {
	if number != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", number, thing)
}

func (l Line) write(b *strings.Builder, age, rates string, style Style) {
	state := l.State
	if l.Stage != "" {
		state = fmt.Sprintf("%s %s", l.Stage, short(l.For))
	}
	color := map[string]string{Ready: green, NotReady: red}[l.State]
	if l.Stage != "" {
		color = yellow
	}
	fmt.Fprintf(b, " %s %4s %5s %9s", style.paint(color, pad(state, 14)), age, fmt.Sprintf("%d/%d", l.Running, l.Containers), size(l.Memory))
	if style.Wide {
		fmt.Fprintf(b, " %8s", size(l.Runtime))
	}
	fmt.Fprintf(b, "%s  %s\n", rates, strings.Join(l.Addresses, ","))
	for _, problem := range l.Problems {
		fmt.Fprintf(b, "  %s\n", style.paint(red, shorten(oneLine(problem), width-2)))
	}
}

// rates are what the pod has used each second since an earlier glance.
func (g *Glance) rates(l Line, earlier *Glance) string {
	if earlier == nil {
		return ""
	}
	seconds := g.At.Sub(earlier.At).Seconds()
	for _, before := range earlier.Pods {
		if before.ID != l.ID || seconds <= 0 {
			continue
		}
		rate := func(now, then uint64) float64 { return float64(now-min(now, then)) / seconds }
		return fmt.Sprintf(" %5.1f%% %8s/s %8s/s", rate(l.CPU, before.CPU)/1e7, size(uint64(rate(l.Received, before.Received))), size(uint64(rate(l.Sent, before.Sent))))
	}
	return fmt.Sprintf(" %6s %10s %10s", "-", "-", "-")
}

func size(bytes uint64) string {
	if bytes == 0 {
		return "-"
	}
	return units.CustomSize("%.3g %s", float64(bytes), 1024, []string{"B", "KiB", "MiB", "GiB", "TiB"})
}
