package main

import (
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/image"
)

// layerLines shows a pull: on a terminal one line for each blob, rewritten as it
// proceeds; elsewhere a line when a blob is done.
type layerLines struct {
	output   io.Writer
	terminal bool
	order    []string
	latest   map[string]image.Progress
	shown    int // lines on the terminal
}

func newLayerLines(output io.Writer) *layerLines {
	return &layerLines{output: output, terminal: isTerminal(output), latest: map[string]image.Progress{}}
}

func isTerminal(output io.Writer) bool {
	file, ok := output.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err == nil
}

// show shows the progress of one layer. Calls do not overlap.
func (l *layerLines) show(p image.Progress) {
	before, known := l.latest[p.Digest]
	if !known {
		l.order = append(l.order, p.Digest)
	}
	l.latest[p.Digest] = p
	switch {
	case l.terminal:
		l.redraw()
	case p.Stage == image.StageDone && before.Stage != image.StageDone:
		fmt.Fprintln(l.output, line(p))
	}
}

func (l *layerLines) redraw() {
	if l.shown > 0 {
		fmt.Fprintf(l.output, "\x1b[%dA", l.shown)
	}
	for _, digest := range l.order {
		fmt.Fprintf(l.output, "\x1b[2K%s\n", line(l.latest[digest]))
	}
	l.shown = len(l.order)
}

// end shows what is left of blobs that need no unpacking.
func (l *layerLines) end() {
	if !l.terminal {
		return
	}
	for digest, p := range l.latest {
		if p.Done == p.Total {
			p.Stage = image.StageDone
			l.latest[digest] = p
		}
	}
	l.redraw()
}

func line(p image.Progress) string {
	return fmt.Sprintf("%s  %-12s %s of %s", shortID(p.Digest), p.Stage, humanSize(p.Done), humanSize(p.Total))
}
