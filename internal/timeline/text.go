package timeline

import (
	"fmt"
	"io"
	"math"
	"strings"
	"time"
	"unicode/utf8"
)

const (
	// width is that of what is written to no terminal, in columns.
	width = 80
	// narrow is the width below which lines are not made shorter.
	narrow = 40
	// indent is where the names of steps begin.
	indent = 22
	// deepest is how far plugins are indented below what ran them.
	deepest = 4
	// whole is the room for a name that is not cut.
	whole = math.MaxInt
)

// Style says how a text is marked.
type Style struct {
	Color bool
	// Width is the number of columns of the terminal, 0 for no limit.
	Width int
	// Height is its number of lines, where no more may be written; 0 for no limit.
	Height int
	// Wide is for lists with all that is known.
	Wide bool
}

// columns are those that a text has.
func (s Style) columns() int {
	if s.Width == 0 {
		return width
	}
	return max(narrow, s.Width)
}

// waterfall is how wide the names and the bars of a waterfall are, with a blank between.
func (s Style) waterfall(lines []*line) (names, bars int) {
	longest := 30
	for _, l := range lines {
		longest = max(longest, 2*min(l.depth, deepest)+2+utf8.RuneCountInString(l.name(whole)))
	}
	room := s.columns() - indent - 1
	names = min(longest, max(room-27, room/2))
	return names, room - names
}

const (
	red    = "31"
	green  = "32"
	yellow = "33"
	faint  = "2"
	bold   = "1"
)

func (s Style) paint(code, text string) string {
	if !s.Color || text == "" || code == "" {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// Text writes the life of a pod as a waterfall, as wide as the terminal.
func (p *Pod) Text(w io.Writer, style Style) error {
	p = printable(p)
	var b strings.Builder
	p.head(&b, style)
	episodes := p.episodes()
	for i, e := range episodes {
		gap := time.Duration(0)
		if i > 0 {
			gap = e.begin.Sub(episodes[i-1].end)
		}
		e.text(&b, style, gap)
	}
	p.verdict(&b, style)
	_, err := io.WriteString(w, b.String())
	return err
}

func (p *Pod) head(b *strings.Builder, style Style) {
	color := map[string]string{Ready: green, Failed: red, Building: yellow}[p.State]
	fmt.Fprintf(b, "%s %s", p.Kind, style.paint(bold, p.Name))
	fmt.Fprintf(b, "%s: %s", attempt(p.Attempt), style.paint(color, p.State))
	if p.State == Failed {
		fmt.Fprintf(b, " after %s", short(p.Took))
	} else if p.Took > 0 {
		fmt.Fprintf(b, ", made in %s", short(p.Took))
	}
	b.WriteString("\n")
	if len(p.Addresses) > 0 {
		fmt.Fprintf(b, "  addresses  %s\n", strings.Join(p.Addresses, ", "))
	}
	fmt.Fprintf(b, "  id         %s\n", p.ID)
	for _, c := range p.Containers {
		room := style.columns() - len("  container   : , ") - 13 - utf8.RuneCountInString(c.State)
		name := middle(c.Name+attempt(c.Attempt), max(16, room-20))
		text := fmt.Sprintf("  container  %s %s: %s", name, shorten(c.ID, 13), c.State)
		if c.Image != "" {
			text += ", " + middle(c.Image, max(8, room-utf8.RuneCountInString(name)))
		}
		fmt.Fprintf(b, "%s\n", shorten(text, style.columns()))
	}
}

// attempt is what follows the name of something that was made before.
func attempt(n uint32) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" (attempt %d)", n)
}

// text writes one episode: a head, a line for each row, and what was slowest.
func (e *episode) text(b *strings.Builder, style Style, gap time.Duration) {
	when := e.begin.UTC().Format("2006-01-02 15:04:05.000 UTC")
	if gap > 0 {
		when += ", " + short(gap) + " later"
	}
	fmt.Fprintf(b, "\n%s\n", style.paint(bold, when))
	names, bars := style.waterfall(e.lines())
	scale := "0" + strings.Repeat(" ", max(1, bars-1-utf8.RuneCountInString(short(e.took())))) + short(e.took())
	fmt.Fprintf(b, "%s\n", style.paint(faint, fmt.Sprintf("%9s %9s   %s %s", "start", "took", pad("step", names), scale)))
	for _, l := range e.lines() {
		e.line(b, style, l, names, bars)
	}
	if slowest := e.slowest(); slowest != "" {
		style.wrap(b, "  slowest: ", slowest, 11)
	}
}

func (e *episode) line(b *strings.Builder, style Style, l *line, names, bars int) {
	mark, color := "✓", green
	if l.failed() {
		mark, color = "✗", red
	}
	depth := min(l.depth, deepest)
	name := pad(strings.Repeat("  ", depth)+mark+" "+l.name(names-2*depth-2), names)
	fmt.Fprintf(b, "%9s %9s   %s %s\n", short(l.at().Sub(e.begin)), short(l.Took),
		strings.Replace(name, mark, style.paint(color, mark), 1), style.paint(color, e.bar(l, bars)))
	for _, text := range l.details() {
		style.wrap(b, strings.Repeat(" ", indent+2*depth), text, indent+2*depth)
	}
}

// details are what a line came to, where there is something to say.
func (l *line) details() (texts []string) {
	if l.Note != "" {
		texts = append(texts, l.Note)
	}
	p := l.Plugin
	switch {
	case !l.failed():
	case p != nil:
		text := explain(p)
		if l.Error != "" {
			text += ": " + l.Error
		}
		texts = append(texts, text)
		if p.Details != "" {
			texts = append(texts, "details: "+oneLine(p.Details))
		}
		if p.Stderr != "" {
			texts = append(texts, "stderr: "+oneLine(p.Stderr))
		}
	case l.blamed():
		texts = append(texts, l.Error)
	}
	return texts
}

// bar is the line in the waterfall, of at most so many columns.
func (e *episode) bar(l *line, most int) string {
	columns := func(d time.Duration) int { return int(d * time.Duration(most) / max(1, e.took())) }
	begin := min(most-1, columns(l.at().Sub(e.begin)))
	mark := "▏"
	if l.Kind == "exit" {
		mark = "●"
	} else if length := min(columns(l.Took), most-begin); length > 0 {
		mark = strings.Repeat("█", length)
	}
	return strings.Repeat(" ", begin) + mark
}

// verdict writes what went wrong, what was undone, and what is left.
func (p *Pod) verdict(b *strings.Builder, style Style) {
	for _, problem := range p.Problems() {
		head := problem.Of + " failed"
		if problem.Step != "" {
			head += " at " + problem.Step
		}
		fmt.Fprintf(b, "\n%s\n", style.paint(red, head))
		style.wrap(b, "  ", oneLine(problem.Text), 2)
		if len(problem.Undone) > 0 {
			style.wrap(b, "  undone: ", strings.Join(problem.Undone, ", "), 10)
		}
		for _, text := range problem.NotUndone {
			style.wrap(b, "  NOT undone: ", text, 14)
		}
	}
}

// short is a duration in three digits or so.
func short(d time.Duration) string {
	switch {
	case d < 0:
		return "0 µs"
	case d < time.Millisecond:
		return fmt.Sprintf("%d µs", d.Microseconds())
	case d < 100*time.Millisecond:
		return fmt.Sprintf("%.1f ms", float64(d)/1e6)
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 100*time.Second:
		return fmt.Sprintf("%.2f s", d.Seconds())
	case d < 48*time.Hour:
		return strings.TrimSuffix(d.Round(time.Second).String(), "0s")
	default:
		return fmt.Sprintf("%d days", int(d.Hours())/24)
	}
}

// shorten cuts a text to a number of letters.
func shorten(text string, most int) string {
	letters := []rune(text)
	if len(letters) <= most {
		return text
	}
	return string(letters[:most-1]) + "…"
}

// middle cuts a text to a number of letters in its middle: names of pods differ at
// their ends.
func middle(text string, most int) string {
	letters := []rune(text)
	if len(letters) <= most || most < 3 {
		return text
	}
	end := (most - 1) * 2 / 3
	return string(letters[:most-1-end]) + "…" + string(letters[len(letters)-end:])
}

// clip cuts a finished line, which may have colours, to the width of the terminal.
func (s Style) clip(line string) string {
	if s.Width <= 0 || utf8.RuneCountInString(line) <= s.Width {
		return line
	}
	var b strings.Builder
	column, code := 0, false
	for _, r := range line {
		switch {
		case code:
			code = r != 'm'
		case r == '\x1b':
			code = true
		case column >= s.Width:
			continue
		default:
			column++
		}
		b.WriteRune(r)
	}
	return b.String()
}

// pad makes a text exactly so many letters wide.
func pad(text string, to int) string {
	text = shorten(text, to)
	return text + strings.Repeat(" ", to-utf8.RuneCountInString(text))
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// wrap writes a text that begins after a prefix, in lines no longer than the
// terminal; those that follow are indented.
func (s Style) wrap(b *strings.Builder, prefix, text string, indent int) {
	line := prefix
	empty := true
	for _, word := range strings.Fields(text) {
		for {
			room := s.columns() - utf8.RuneCountInString(line)
			if !empty {
				room--
			}
			letters := []rune(word)
			if len(letters) <= room {
				break
			}
			if empty { // longer than a line
				b.WriteString(line + string(letters[:room]) + "\n")
				word = string(letters[room:])
			} else {
				b.WriteString(line + "\n")
			}
			line, empty = strings.Repeat(" ", indent), true
		}
		if !empty {
			line += " "
		}
		line, empty = line+word, false
	}
	b.WriteString(line + "\n")
}

// cut cuts a name that begins at a column to what is left of the line.
func (s Style) cut(name string, column int) string {
	if s.Width == 0 {
		return name
	}
	return middle(name, max(20, s.Width-column))
}

// List writes one line for each pod, and a second one with why it failed.
func List(w io.Writer, pods []Pod, now time.Time, style Style) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", style.paint(faint, fmt.Sprintf("%-13s  %9s  %9s  %-10s  %s", "ID", "AGE", "TOOK", "STATE", "NAME")))
	for _, p := range printable(pods) {
		color := map[string]string{Ready: green, Failed: red, Building: yellow}[p.State]
		name := p.Name + attempt(p.Attempt)
		if p.Kind != "pod" {
			name = p.Kind + " " + name
		}
		fmt.Fprintf(&b, "%-13s  %9s  %9s  %s  %s\n", shorten(p.ID, 13), age(p.Begin, now), short(p.Took), style.paint(color, pad(p.State, 10)), style.cut(name, 13+2+9+2+9+2+10+2))
		for _, problem := range p.Problems() {
			at := problem.Of
			if problem.Step != "" {
				at += ", " + problem.Step
			}
			fmt.Fprintf(&b, "  %s\n", style.paint(red, shorten(at+": "+oneLine(problem.Text), style.columns()-2)))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// age is how long ago something was, "-" if that is not known.
func age(at, now time.Time) string {
	switch d := now.Sub(at); {
	case at.IsZero():
		return "-"
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	default:
		return fmt.Sprintf("%dd", int(d.Hours())/24)
	}
}
