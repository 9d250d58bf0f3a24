// Package timeline shows the life of a pod as a waterfall for a terminal, and pods as tables. It reads nothing but
// its arguments, and keeps no state. Package redact goes over what others wrote.
package timeline

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/step"
)

// The states of a pod.
const (
	Ready    = "ready"
	NotReady = "not ready"
	Building = "being made"
	Failed   = "failed"
	Removed  = "removed"
)

// Pod is what is shown of a pod, of a container whose pod is not known, or of an image pull that was for none.
type Pod struct {
	Kind       string        `json:"kind"` // "pod", "container" or "image"
	ID         string        `json:"id"`
	Name       string        `json:"name"` // NAMESPACE/NAME, or the reference of the image
	Attempt    uint32        `json:"attempt,omitempty"`
	State      string        `json:"state"`
	Error      string        `json:"error,omitempty"` // why it could not be made
	Begin      time.Time     `json:"begin,omitzero"`
	Took       time.Duration `json:"took"`           // to be made, or to fail
	Rows       []step.Row    `json:"rows,omitempty"` // of the pod itself
	Containers []Container   `json:"containers,omitempty"`
	Addresses  []string      `json:"addresses,omitempty"`
	Network    *Network      `json:"network,omitempty"`
}

// Container is what is shown of a container.
type Container struct {
	ID      string     `json:"id"`
	Name    string     `json:"name"`
	Attempt uint32     `json:"attempt,omitempty"`
	State   string     `json:"state"`
	Image   string     `json:"image,omitempty"`
	Error   string     `json:"error,omitempty"`
	Rows    []step.Row `json:"rows,omitempty"`
}

// Network is the network of a pod: its configuration and its result.
type Network struct {
	Name   string          `json:"name,omitempty"`
	Config json.RawMessage `json:"config,omitempty"`
	Result json.RawMessage `json:"result,omitempty"`
	Path   string          `json:"path,omitempty"`  // where the namespace is pinned
	Waits  string          `json:"waits,omitempty"` // why the attachment could not be released yet
}

// Finish sets what follows from the rows, and removes secrets from what others wrote.
func (p *Pod) Finish() {
	p.Begin, p.Took = making(p.Rows)
	p.Error = redact.Text(p.Error)
	clean(p.Rows)
	for i := range p.Containers {
		p.Containers[i].Error = redact.Text(p.Containers[i].Error)
		clean(p.Containers[i].Rows)
	}
	begin := func(c Container) (at time.Time) {
		if len(c.Rows) > 0 {
			at = c.Rows[0].Start
		}
		return at
	}
	slices.SortStableFunc(p.Containers, func(a, b Container) int { return begin(a).Compare(begin(b)) })
	if n := p.Network; n != nil {
		n.Config, n.Result, n.Waits = redact.JSON(n.Config), redact.JSON(n.Result), redact.Text(n.Waits)
	}
}

func clean(rows []step.Row) {
	for i, row := range rows {
		rows[i].Error = redact.Text(row.Error)
		if row.Plugin != nil {
			plugin := *row.Plugin
			plugin.Message, plugin.Details, plugin.Stderr = redact.Text(plugin.Message), redact.Text(plugin.Details), redact.Text(plugin.Stderr)
			rows[i].Plugin = &plugin
		}
	}
}

func end(row step.Row) time.Time { return row.Start.Add(row.Took) }

// making returns when a pod began, and how long it took to be started or to fail.
func making(rows []step.Row) (began time.Time, took time.Duration) {
	if len(rows) == 0 {
		return began, 0
	}
	began = rows[0].Start
	if rows[0].Kind == "image" {
		return began, rows[0].Took
	}
	if first := rows[0].Step; first == "cni del" || first == "stop containers" { // a reboot has taken how it was made
		return began, 0
	}
	for _, row := range rows {
		if row.Kind == "image" || row.Kind == "plugin" {
			continue
		}
		took = max(took, end(row).Sub(began))
		if row.Step == "start" || row.Error != "" {
			break
		}
	}
	return began, took
}

// LastChange is when the timeline ends.
func (p *Pod) LastChange() (last time.Time) {
	for _, e := range p.episodes() {
		last = e.end
	}
	return last
}

// Matches reports whether wanted is "", or an id or its beginning, a name or NAMESPACE/NAME of pod or container.
func (p *Pod) Matches(wanted string) bool {
	if kind, name, listed := strings.Cut(wanted, " "); listed && kind == p.Kind { // as the list prints it
		wanted = name
	}
	_, name, _ := strings.Cut(p.Name, "/")
	if wanted == "" || strings.HasPrefix(p.ID, wanted) || p.Name == wanted || name == wanted {
		return true
	}
	return slices.ContainsFunc(p.Containers, func(c Container) bool {
		return strings.HasPrefix(c.ID, wanted) || c.Name == wanted || p.Name+"/"+c.Name == wanted
	})
}

// Problem is one thing that went wrong in a life.
type Problem struct {
	Of   string `json:"of"`             // "the pod", "container web", "the pull of IMAGE"
	Step string `json:"step,omitempty"` // the one that failed, if any
	Text string `json:"text"`
	// Undone are the steps of teardown that followed, NotUndone those of them that failed.
	Undone    []string `json:"undone,omitempty"`
	NotUndone []string `json:"notUndone,omitempty"`
}

// Problems are what went wrong, by time.
func (p *Pod) Problems() (all []Problem) {
	for _, row := range p.Rows {
		if row.Kind == "image" && row.Error != "" && p.Kind != "image" {
			all = append(all, Problem{Of: "the pull of " + row.Step, Text: row.Error})
		}
	}
	switch {
	case p.Error != "" && p.Kind == "image":
		all = append(all, Problem{Of: "the pull", Text: p.Error})
	case p.Error != "":
		all = append(all, failure("the "+p.Kind, p.Error, p.Rows))
	default:
		all = append(all, stepProblems("the pod", p.Rows)...)
	}
	for _, c := range p.Containers {
		of := "container " + c.Name
		if p.attempts(c.Name) > 1 {
			of = fmt.Sprintf("%s (attempt %d)", of, c.Attempt)
		}
		all = append(all, c.problems(of)...)
	}
	if p.Network != nil && p.Network.Waits != "" {
		all = append(all, Problem{Of: "the network", Text: p.Network.Waits})
	}
	return all
}

// attempts is how many containers of the pod have a name.
func (p *Pod) attempts(name string) (count int) {
	for _, c := range p.Containers {
		if c.Name == name {
			count++
		}
	}
	return count
}

func (c *Container) problems(of string) (all []Problem) {
	if c.Error != "" {
		return []Problem{failure(of, c.Error, c.Rows)}
	}
	for _, row := range c.Rows {
		code, failed := strings.CutPrefix(row.Note, "Error, ")
		switch {
		case row.Kind != "exit" || stopped(c.Rows, row):
		case row.Error != "":
			all = append(all, Problem{Of: of, Text: row.Note + ": " + row.Error})
		case failed:
			log := "see `crictl logs " + c.ID[:min(len(c.ID), 12)] + "`"
			all = append(all, Problem{Of: of, Text: "its program ended with " + code + ": " + log})
		}
	}
	if len(all) == 0 {
		all = stepProblems(of, c.Rows)
	}
	return all
}

func stopped(rows []step.Row, exit step.Row) bool {
	return slices.ContainsFunc(rows, func(r step.Row) bool { return r.Step == "kill" && isStep(r) && !r.Start.After(end(exit)) })
}

func isStep(row step.Row) bool {
	return !slices.Contains([]string{"plugin", "image", "exit"}, row.Kind)
}

// stepProblems are the steps that failed, each name once, the last time.
func stepProblems(of string, rows []step.Row) (all []Problem) {
	for i, row := range rows {
		again := slices.ContainsFunc(rows[i+1:], func(later step.Row) bool { return later.Step == row.Step && later.Kind == row.Kind })
		if row.Error != "" && isStep(row) && !again {
			all = append(all, Problem{Of: of, Step: row.Step, Text: row.Error})
		}
	}
	return all
}

// failure is why something could not be made, and what was undone then.
func failure(of, text string, rows []step.Row) Problem {
	problem := Problem{Of: of, Text: text}
	var failed time.Time
	for i, row := range rows {
		switch {
		case !isStep(row):
		case problem.Step == "" && row.Error != "":
			problem.Step, failed = row.Step, end(row)
			if _, own, found := strings.Cut(text, row.Step+": "); found && own != "" {
				problem.Text = own
			}
		case problem.Step == "" || row.Start.Before(failed):
		case row.Error != "":
			problem.NotUndone = append(problem.NotUndone, row.Step+": "+row.Error)
		case pluginFailed(rows, i):
			problem.NotUndone = append(problem.NotUndone, row.Step+": a plugin failed, it is retried in the background")
		default:
			problem.Undone = append(problem.Undone, row.Step)
		}
	}
	return problem
}

// pluginFailed reports whether a plugin of the step failed. The journal then retries the DEL.
func pluginFailed(rows []step.Row, of int) bool {
	for i, r := range rows {
		if r.Kind == "plugin" && r.Error != "" && stepOf(rows, i) == of {
			return true
		}
	}
	return false
}
