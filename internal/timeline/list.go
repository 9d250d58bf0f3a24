package timeline

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// List writes one line for each pod, and a second one with why it failed.
func List(w io.Writer, pods []Pod, now time.Time, style Style) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", style.paint(faint, fmt.Sprintf("%-13s  %9s  %9s  %-10s  %s", "ID", "BEGAN", "TOOK", "STATE", "NAME")))
	for _, p := range pods {
		color := map[string]string{Ready: green, Failed: red, Building: yellow}[p.State]
		name := p.Name
		if p.Kind != "pod" {
			name = p.Kind + " " + name
		}
		if p.Attempt > 0 {
			name += fmt.Sprintf(" (attempt %d)", p.Attempt)
		}
		fmt.Fprintf(&b, "%-13s  %9s  %9s  %s  %s\n", shorten(p.ID, 13), p.age(now), short(p.Took), style.paint(color, pad(p.State, 10)), shorten(name, 31))
		for _, problem := range p.Problems() {
			at := problem.Of
			if problem.Step != "" {
				at += ", " + problem.Step
			}
			fmt.Fprintf(&b, "  %s\n", style.paint(red, shorten(at+": "+oneLine(problem.Text), width-2)))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// age is how long ago the pod began.
func (p *Pod) age(now time.Time) string {
	switch d := now.Sub(p.Begin); {
	case p.Begin.IsZero():
		return "-" // nothing is known of it but its record
	case d < time.Minute:
		return fmt.Sprintf("%ds ago", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm ago", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh ago", int(d.Hours()))
	default:
		return fmt.Sprintf("%dd ago", int(d.Hours())/24)
	}
}
