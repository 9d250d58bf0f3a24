package timeline

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/step"
)

const (
	width   = 80          // without a terminal
	indent  = 22          // where the names of steps begin
	deepest = 4           // how far plugins are indented below what ran them
	whole   = math.MaxInt // the room for a name that is not cut
)

type line struct {
	step.Row
	container string // "" for the pod's own rows
	depth     int
	children  []*line
}

// name cuts the middle of a name, rather of a container's than of its step's.
func (l *line) name(most int) string {
	name := l.Step
	switch l.Kind {
	case "image":
		name = "pull " + l.Step
	case "exit":
		name = "ended"
	}
	if l.container != "" {
		return middle(l.container, max(8, most-len(": ")-utf8.RuneCountInString(name))) + ": " + name
	}
	return middle(name, most)
}

// at is when the line happened. A container's run happened when it ended.
func (l *line) at() time.Time {
	if l.Kind == "exit" {
		return end(l.Row)
	}
	return l.Start
}

// failed reports whether the row, or a plugin of the step, failed: teardown leaves a failed DEL to a retry.
func (l *line) failed() bool { return l.Error != "" || l.Kind != "plugin" && l.pluginFailed() }

func (l *line) pluginFailed() bool { return slices.ContainsFunc(l.children, (*line).failed) }

// episode is a part of a life without a pause. roots are steps; lines also have their plugins, each after its step.
type episode struct {
	begin, end   time.Time
	roots, lines []*line
}

func (e *episode) took() time.Duration { return e.end.Sub(e.begin) }

// episodeGap is the pause that divides episodes.
const episodeGap = 2 * time.Second

func (p *Pod) episodes() (all []*episode) {
	roots := tree(p.Rows, "")
	for _, c := range p.Containers {
		roots = append(roots, tree(c.Rows, c.Name)...)
	}
	slices.SortStableFunc(roots, func(a, b *line) int { return a.at().Compare(b.at()) })
	var e *episode
	var add func(lines []*line)
	add = func(lines []*line) {
		for _, l := range lines {
			e.lines = append(e.lines, l)
			add(l.children)
		}
	}
	for _, root := range roots {
		if e == nil || root.at().Sub(e.end) > episodeGap {
			e = &episode{begin: root.at(), end: end(root.Row)}
			all = append(all, e)
		}
		e.roots = append(e.roots, root)
		add([]*line{root})
		if last := end(root.Row); last.After(e.end) {
			e.end = last
		}
	}
	return all
}

// tree puts the rows of plugins below what ran them.
func tree(rows []step.Row, container string) (roots []*line) {
	lines := make([]*line, len(rows))
	for i, row := range rows {
		l := &line{Row: row, container: container}
		lines[i] = l
		above := stepOf(rows, i)
		if above < 0 {
			roots = append(roots, l)
			continue
		}
		parent := lines[above]
		l.depth, l.container = parent.depth+1, ""
		parent.children = append(parent.children, l)
	}
	return roots
}

// stepOf returns the index of the row that rows[i] belongs to, -1 if none: the last one before it with the name that
// it gives as its parent. Their times do not tell: two readings of the clock may be as far apart as the machine is busy.
func stepOf(rows []step.Row, i int) int {
	parent := rows[i].Parent
	for at := i - 1; at >= 0 && parent != ""; at-- {
		if rows[at].Step == parent && (rows[at].Kind != "plugin" || strings.Contains(parent, " ")) {
			return at
		}
	}
	return -1
}

// waits says what a step waits for, to tell the runtime from what is around it.
var waits = map[string]string{
	"record": "the disk of the runtime's directory", "sync": "the disk of the runtime's directory",
	"cni add": "the network's plugins", "cni del": "the network's plugins",
	"rootfs": "the disk of the image store", "volumes": "the disk of the image store", "remove rootfs": "the disk of the image store",
	"kill": "the process, which had time to end", "stop containers": "the processes, which had time to end",
	"record stopped": "the disk of the runtime's directory", "remove record": "the disk of the runtime's directory",
	"prepare": "the kernel and the CPU: a process is started", "create": "the kernel and the CPU: a process is started",
	"files": "the log directory and the volatile directory", "sources": "the paths that are mounted",
}

// slowest returns the step that took longest, with the cause, and its share of the episode.
func (e *episode) slowest() (text string, share float64) {
	var worst *line
	for _, root := range e.roots {
		if root.Kind != "exit" && (worst == nil || root.Took > worst.Took) {
			worst = root
		}
	}
	if worst == nil || e.took() <= 0 {
		return "", 0
	}
	names, last := worst.name(whole), worst
	for len(last.children) > 0 {
		below := slices.MaxFunc(last.children, func(a, b *line) int { return int(a.Took - b.Took) })
		if below.Took*10 < worst.Took*6 {
			break
		}
		names, last = names+" > "+below.name(whole), below
	}
	text = fmt.Sprintf("%s took %s of %s", names, short(last.Took), short(e.took()))
	switch waited := waits[worst.Step]; {
	case worst.Kind == "image":
		text += ": the registry, the line to it and the disk"
	case last.Kind == "plugin":
		text += ": the plugin " + last.Plugin.Name
	case waited != "":
		text += ": " + waited
	}
	return text, float64(worst.Took) / float64(e.took())
}

func (s Style) columns() int {
	if s.Width == 0 {
		return width
	}
	return max(40, s.Width)
}

// Text writes the life of a pod as a waterfall, as wide as the terminal.
func (p *Pod) Text(w io.Writer, style Style) error {
	shown := redact.Lines(*p)
	var b strings.Builder
	shown.head(&b, style)
	var last time.Time
	problems := shown.Problems()
	for _, e := range shown.episodes() {
		when := e.begin.UTC().Format(timeFormat)
		if !last.IsZero() {
			when += ", " + short(e.begin.Sub(last)) + " later"
		}
		fmt.Fprintf(&b, "\n%s\n", style.paint(bold, when))
		e.text(&b, style)
		if text, share := e.slowest(); text != "" && (len(problems) == 0 || share >= 0.5) { // else it hides the cause
			style.wrap(&b, "  slowest: ", text)
		}
		last = e.end
	}
	for _, problem := range problems {
		head := problem.Of + " failed"
		if problem.Step != "" {
			head += " at " + problem.Step
		}
		fmt.Fprintf(&b, "\n%s\n", style.paint(red, head))
		style.wrap(&b, "  ", problem.Text)
		if len(problem.Undone) > 0 {
			style.wrap(&b, "  undone: ", strings.Join(problem.Undone, ", "))
		}
		for _, text := range problem.NotUndone {
			style.wrap(&b, "  NOT undone: ", text)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (p *Pod) head(b *strings.Builder, style Style) {
	fmt.Fprintf(b, "%s %s%s: %s", p.Kind, style.paint(bold, p.Name), attempt(p.Attempt), style.paint(colors[p.State], p.State))
	switch {
	case p.State == Failed:
		fmt.Fprintf(b, " after %s", short(p.Took))
	case p.State == Building:
		fmt.Fprintf(b, " for %s", short(p.Took))
	case p.Took > 0:
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
		image := middle(c.Image, max(8, room-utf8.RuneCountInString(name)))
		fmt.Fprintln(b, shorten(strings.TrimSuffix(fmt.Sprintf("  container  %s %s: %s, %s", name, shorten(c.ID, 13), c.State, image), ", "), style.columns()))
	}
}

func (e *episode) text(b *strings.Builder, style Style) {
	names := 30
	for _, l := range e.lines {
		names = max(names, 2*min(l.depth, deepest)+2+utf8.RuneCountInString(l.name(whole)))
	}
	room := style.columns() - indent - 1
	names = min(names, max(room-27, room/2))
	bars := room - names
	fmt.Fprintln(b, style.paint(faint, fmt.Sprintf("%9s %9s   %-*s 0%*s", "start", "took", names, "step", bars-1, short(e.took()))))
	for _, l := range e.lines {
		depth := min(l.depth, deepest)
		mark, color := l.mark()
		name := shorten(l.name(names-2*depth-2), names-2*depth-2)
		fmt.Fprintf(b, "%9s %9s   %s%s %-*s %s\n", short(l.at().Sub(e.begin)), short(l.Took), strings.Repeat("  ", depth), style.paint(color, mark),
			names-2*depth-2, name, style.paint(color, e.bar(l, bars)))
		for _, text := range l.details() {
			style.wrap(b, strings.Repeat(" ", indent+2*depth), text)
		}
	}
}

// mark returns the sign of the line and its color.
func (l *line) mark() (sign, color string) {
	switch {
	case l.failed():
		return "✗", red
	case l.Running:
		return "…", yellow
	}
	return "✓", green
}

func (l *line) details() (texts []string) {
	if l.Note != "" {
		texts = append(texts, l.Note)
	}
	p := l.Plugin
	if !l.failed() || p == nil {
		if l.Error != "" && !l.pluginFailed() {
			texts = append(texts, l.Error)
		}
		return texts
	}
	text := fmt.Sprintf("exit code %d", p.Exit)
	switch {
	case p.Killed:
		text = "killed"
	case p.Signal != 0:
		text = fmt.Sprintf("ended by signal %d", p.Signal)
	case p.Code != 0:
		text += fmt.Sprintf(", CNI error code %d", p.Code)
	}
	if l.Error != "" {
		text += ": " + l.Error
	}
	texts = append(texts, text)
	if p.Details != "" {
		texts = append(texts, "details: "+p.Details)
	}
	if p.Stderr != "" {
		texts = append(texts, "stderr: "+p.Stderr)
	}
	return texts
}

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

// wrap writes a text after a prefix, in lines no longer than the terminal.
func (s Style) wrap(b *strings.Builder, prefix, text string) { s.wrapIn(b, "", prefix, text) }

func (s Style) wrapIn(b *strings.Builder, color, prefix, text string) {
	room := s.columns() - utf8.RuneCountInString(prefix)
	for letters := []rune(oneLine(text)); len(letters) > 0; prefix = strings.Repeat(" ", utf8.RuneCountInString(prefix)) {
		cut := min(len(letters), room)
		for cut < len(letters) && cut > 0 && letters[cut] != ' ' {
			cut--
		}
		if cut == 0 { // one long word
			cut = room
		}
		fmt.Fprintln(b, prefix+s.paint(color, string(letters[:cut])))
		letters = []rune(strings.TrimLeft(string(letters[cut:]), " "))
	}
}
