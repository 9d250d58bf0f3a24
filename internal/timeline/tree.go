package timeline

import (
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/minicri/minicri/internal/step"
)

// line is one row as it is shown: where it stands in the tree and which
// container it is of.
type line struct {
	step.Row
	// container is the container's name, "" for the pod's own rows.
	container string
	depth     int
	children  []*line
}

// name is what the line is called, in so many letters: of a name that is longer the
// middle is left out, that of a container before that of its step.
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

// at is when the line happened: what a container did is shown where it ended.
func (l *line) at() time.Time {
	if l.Kind == "exit" {
		return l.end()
	}
	return l.Start
}

func (l *line) end() time.Time { return l.Start.Add(l.Took) }

// failed reports whether the row is one of something that went wrong. A step whose
// plugin failed did: of a pod that is undone, the DEL is left to a retry, which is no
// error of the step.
func (l *line) failed() bool {
	return l.Error != "" || l.Kind != "plugin" && slices.ContainsFunc(l.children, (*line).failed)
}

// blamed reports whether the line failed by itself, and not because a plugin
// below it did.
func (l *line) blamed() bool {
	return l.failed() && !slices.ContainsFunc(l.children, (*line).failed)
}

// all are the line and all below it.
func (l *line) all() []*line {
	all := []*line{l}
	for _, child := range l.children {
		all = append(all, child.all()...)
	}
	return all
}

// episode is a part of a life in which something was always happening: the
// making of a pod, its end.
type episode struct {
	begin, end time.Time
	// roots are the steps, in order of time; their plugins are below them.
	roots []*line
}

func (e *episode) took() time.Duration { return e.end.Sub(e.begin) }

// lines are all lines of the episode, plugins after the step that ran them.
func (e *episode) lines() (all []*line) {
	for _, root := range e.roots {
		all = append(all, root.all()...)
	}
	return all
}

// quiet is how long nothing happens between two episodes.
const quiet = 2 * time.Second

// episodes are the parts of a life, in order of time.
func (p *Pod) episodes() (all []*episode) {
	roots := tree(p.Rows, "")
	for _, c := range p.Containers {
		roots = append(roots, tree(c.Rows, c.Name)...)
	}
	slices.SortStableFunc(roots, func(a, b *line) int { return a.at().Compare(b.at()) })
	for _, root := range roots {
		last := len(all) - 1
		if last < 0 || root.at().Sub(all[last].end) > quiet {
			all = append(all, &episode{begin: root.at(), end: root.end()})
			last++
		}
		e := all[last]
		e.roots = append(e.roots, root)
		if root.end().After(e.end) {
			e.end = root.end()
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
		parent := parentOf(lines[:i], row)
		if parent == nil {
			roots = append(roots, l)
			continue
		}
		l.depth, l.container = parent.depth+1, ""
		parent.children = append(parent.children, l)
	}
	return roots
}

// parentOf is the last line before that has the name and was under way then.
func parentOf(before []*line, row step.Row) *line {
	if row.Parent == "" {
		return nil
	}
	for i := len(before) - 1; i >= 0; i-- {
		l := before[i]
		isStep := l.Kind != "plugin" || strings.Contains(row.Parent, " ")
		if l.Step == row.Parent && isStep && !row.Start.After(l.end()) {
			return l
		}
	}
	return nil
}
