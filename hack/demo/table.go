package main

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// table prints rows as they come: step, duration and result.
type table struct{ output io.Writer }

func newTable(output io.Writer) *table { return &table{output: output} }

func (t *table) title(text string) {
	fmt.Fprintf(t.output, "\n%s\n%s\n", text, strings.Repeat("─", len([]rune(text))))
}

func (t *table) row(what string, took time.Duration, result string, err error) {
	mark := "✓"
	if err != nil {
		mark, result = "✗", err.Error()
	}
	fmt.Fprintf(t.output, "%s %-34s %9s   %s\n", mark, what, short(took), result)
}

func (t *table) count(what string, number int) {
	mark := "✓"
	if number != 0 {
		mark = "✗"
	}
	fmt.Fprintf(t.output, "%s %-34s %9d\n", mark, what, number)
}

// short is a duration with about three digits.
func short(d time.Duration) string {
	switch {
	case d >= time.Second:
		return d.Round(10 * time.Millisecond).String()
	case d >= time.Millisecond:
		return fmt.Sprintf("%.1fms", float64(d)/float64(time.Millisecond))
	default:
		return fmt.Sprintf("%dµs", d.Microseconds())
	}
}
