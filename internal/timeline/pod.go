// Package timeline shows the life of a pod as a waterfall for a terminal, and in a
// list of many. It reads nothing but what it is
// given, which internal/inspect collects, and keeps no state. Whatever others
// have written in it goes through package redact first.
package timeline

import (
	"cmp"
	"encoding/json"
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

// Pod is all that is shown of one pod, of a container whose pod is not known, or
// of the pull of an image that was for none.
type Pod struct {
	// Kind is "pod", "container" or "image".
	Kind string `json:"kind"`
	ID   string `json:"id"`
	// Name is NAMESPACE/NAME, or the reference of the image.
	Name    string `json:"name"`
	Attempt uint32 `json:"attempt,omitempty"`
	State   string `json:"state"`
	// Error is why it could not be made.
	Error string `json:"error,omitempty"`
	// Begin is when it began, Took how long it took to be made or to fail.
	Begin time.Time     `json:"begin,omitzero"`
	Took  time.Duration `json:"took"`
	// Rows are those of the pod itself.
	Rows       []step.Row  `json:"rows,omitempty"`
	Containers []Container `json:"containers,omitempty"`
	Addresses  []string    `json:"addresses,omitempty"`
	Network    *Network    `json:"network,omitempty"`
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

// Network is the network of a pod: as it was asked for, and as it was given.
type Network struct {
	Name   string          `json:"name,omitempty"`
	Config json.RawMessage `json:"config,omitempty"`
	Result json.RawMessage `json:"result,omitempty"`
	// Path is where the namespace is pinned.
	Path string `json:"path,omitempty"`
	// Waits says why the attachment could not be released yet, "" if it was, or
	// if it was not asked for.
	Waits string `json:"waits,omitempty"`
}

// Finish sets what follows from the rows, and takes secrets out of all that
// others have written.
func (p *Pod) Finish() {
	p.Begin, p.Took = making(p.Rows)
	p.Error = redact.Text(p.Error)
	clean(p.Rows)
	for i := range p.Containers {
		p.Containers[i].Error = redact.Text(p.Containers[i].Error)
		clean(p.Containers[i].Rows)
	}
	slices.SortStableFunc(p.Containers, func(a, b Container) int { return begin(a.Rows).Compare(begin(b.Rows)) })
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

func begin(rows []step.Row) time.Time {
	if len(rows) == 0 {
		return time.Time{}
	}
	return rows[0].Start
}

// making is when the rows of a pod begin, and how long it took from then until
// it was started, or until the first step that failed had ended; until now for
// one that is being made.
func making(rows []step.Row) (began time.Time, took time.Duration) {
	if len(rows) == 0 {
		return began, 0
	}
	began = rows[0].Start
	end := began
	for _, row := range rows {
		if row.Kind == "image" || row.Kind == "plugin" {
			continue
		}
		if at := row.Start.Add(row.Took); at.After(end) {
			end = at
		}
		if row.Step == "start" || row.Error != "" {
			break
		}
	}
	if rows[0].Kind == "image" {
		end = began.Add(rows[0].Took)
	}
	return began, end.Sub(began)
}

// LastChange is when the last thing happened that the timeline has.
func (p *Pod) LastChange() (last time.Time) {
	for _, e := range p.episodes() {
		last = e.end
	}
	return last
}

// DidFail reports whether the pod, one of its containers or a pull for it failed,
// or its network could not be released.
func (p *Pod) DidFail() bool { return len(p.Problems()) > 0 }

// Matches reports whether the pod, or one of its containers, is what was asked
// for: an id or its beginning, a name, or NAMESPACE/NAME.
func (p *Pod) Matches(wanted string) bool {
	if wanted == "" || strings.HasPrefix(p.ID, wanted) || p.Name == wanted || path(p.Name) == wanted {
		return true
	}
	return slices.ContainsFunc(p.Containers, func(c Container) bool {
		return strings.HasPrefix(c.ID, wanted) || c.Name == wanted || p.Name+"/"+c.Name == wanted
	})
}

// path is a name without its namespace.
func path(name string) string {
	_, rest, ok := strings.Cut(name, "/")
	if !ok {
		return name
	}
	return rest
}

// Newest sorts pods, those that began last first.
func Newest(pods []Pod) {
	slices.SortStableFunc(pods, func(a, b Pod) int { return b.Begin.Compare(a.Begin) })
}

// Slowest sorts pods, those that took longest first.
func Slowest(pods []Pod) {
	slices.SortStableFunc(pods, func(a, b Pod) int { return cmp.Compare(b.Took, a.Took) })
}
