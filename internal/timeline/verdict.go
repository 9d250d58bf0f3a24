package timeline

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/minicri/minicri/internal/step"
)

// Problem is one thing that went wrong in a life.
type Problem struct {
	// Of is what it happened to: "the pod", "container web", "the pull of IMAGE".
	Of string `json:"of"`
	// Step is the step that failed, "" where none did.
	Step string `json:"step,omitempty"`
	Text string `json:"text"`
	// Undone are the steps of teardown that followed, NotUndone those that failed.
	Undone    []string `json:"undone,omitempty"`
	NotUndone []string `json:"notUndone,omitempty"`
}

// Problems are what went wrong, in order of time; none in a life without.
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
		all = append(all, c.problems()...)
	}
	if p.Network != nil && p.Network.Waits != "" {
		all = append(all, Problem{Of: "the network", Text: p.Network.Waits})
	}
	return all
}

func (c *Container) problems() (all []Problem) {
	of := "container " + c.Name
	if c.Error != "" {
		return []Problem{failure(of, c.Error, c.Rows)}
	}
	for _, row := range c.Rows {
		if row.Kind == "exit" && stopped(c.Rows, row) {
			continue
		}
		if row.Kind == "exit" && row.Error != "" {
			all = append(all, Problem{Of: of, Text: row.Note + ": " + row.Error})
		} else if row.Kind == "exit" && strings.HasPrefix(row.Note, "Error") {
			all = append(all, Problem{Of: of, Text: "its program ended with " + strings.TrimPrefix(row.Note, "Error, ") + ": see the container's log"})
		}
	}
	if len(all) == 0 {
		all = stepProblems(of, c.Rows)
	}
	return all
}

// stopped reports whether a container was being stopped when it ended.
func stopped(rows []step.Row, exit step.Row) bool {
	end := exit.Start.Add(exit.Took)
	return slices.ContainsFunc(rows, func(r step.Row) bool { return r.Step == "kill" && r.Kind != "exit" && !r.Start.After(end) })
}

// stepProblems are the steps that failed, each name once, the last time.
func stepProblems(of string, rows []step.Row) (all []Problem) {
	for i, row := range rows {
		again := slices.ContainsFunc(rows[i+1:], func(later step.Row) bool { return later.Step == row.Step && later.Kind == row.Kind })
		if row.Error != "" && row.Kind != "plugin" && row.Kind != "image" && row.Kind != "exit" && !again {
			all = append(all, Problem{Of: of, Step: row.Step, Text: row.Error})
		}
	}
	return all
}

// failure is why something could not be made, and what was undone then.
func failure(of, text string, rows []step.Row) Problem {
	problem := Problem{Of: of, Text: text}
	var end time.Time
	for _, row := range rows {
		switch {
		case row.Kind == "plugin" || row.Kind == "image" || row.Kind == "exit":
		case problem.Step == "" && row.Error != "":
			problem.Step, end = row.Step, row.Start.Add(row.Took)
			if _, own, found := strings.Cut(text, row.Step+": "); found && own != "" {
				problem.Text = own
			}
		case problem.Step == "" || row.Start.Before(end):
		case row.Error != "":
			problem.NotUndone = append(problem.NotUndone, row.Step+": "+row.Error)
		case pluginFailed(rows, row):
			problem.NotUndone = append(problem.NotUndone, row.Step+": a plugin failed, it is retried in the background")
		default:
			problem.Undone = append(problem.Undone, row.Step)
		}
	}
	return problem
}

// pluginFailed reports whether a plugin failed that was run for the step. A pod
// that could not be made leaves such a DEL to the network's journal.
func pluginFailed(rows []step.Row, of step.Row) bool {
	end := of.Start.Add(of.Took)
	return slices.ContainsFunc(rows, func(r step.Row) bool {
		return r.Kind == "plugin" && r.Error != "" && r.Parent == of.Step && !r.Start.Before(of.Start) && !r.Start.After(end)
	})
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

// slowest says which step of an episode took longest and what it waited for.
func (e *episode) slowest() string {
	var worst *line
	for _, root := range e.roots {
		if root.Kind != "exit" && (worst == nil || root.Took > worst.Took) {
			worst = root
		}
	}
	if worst == nil || e.took() <= 0 {
		return ""
	}
	names, last := []string{worst.name(whole)}, worst
	for deeper := true; deeper; {
		deeper = false
		for _, child := range last.children {
			if child.Took*10 >= worst.Took*6 {
				names, last, deeper = append(names, child.name(whole)), child, true
				break
			}
		}
	}
	text := fmt.Sprintf("%s took %s of %s", strings.Join(names, " > "), short(last.Took), short(e.took()))
	switch waited := waits[worst.Step]; {
	case worst.Kind == "image":
		text += ": the registry, the line to it and the disk"
	case last.Kind == "plugin":
		text += ": the plugin " + last.Plugin.Name
	case waited != "":
		text += ": " + waited
	}
	return text
}

// explain says what a row of a plugin came to.
func explain(p *step.Plugin) string {
	switch {
	case p.Killed:
		return "killed"
	case p.Signal != 0:
		return fmt.Sprintf("ended by signal %d", p.Signal)
	case p.Code != 0:
		return fmt.Sprintf("exit code %d, CNI error code %d", p.Exit, p.Code)
	default:
		return fmt.Sprintf("exit code %d", p.Exit)
	}
}
