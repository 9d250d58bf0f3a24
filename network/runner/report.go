package runner

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
)

// Report is what became of one plugin of a run.
type Report struct {
	Plugin string `json:"plugin"`
	Verb   string `json:"verb"`
	// Parent is the plugin that ran it and its verb, as "bridge ADD" runs an
	// IPAM plugin; "" for the plugins of the chain.
	Parent string        `json:"parent,omitempty"`
	Start  time.Time     `json:"start"`
	Took   time.Duration `json:"took"`
	// Ended is false for a plugin that was killed with its run, or still runs;
	// nothing of what follows is known then.
	Ended bool `json:"ended"`
	// Exit is its exit code; Signal the one that ended it instead, or 0.
	Exit   int `json:"exit"`
	Signal int `json:"signal,omitempty"`
	// Code, Message and Details are its CNI error (CNI SPEC, "Error").
	Code    uint   `json:"code,omitempty"`
	Message string `json:"message,omitempty"`
	Details string `json:"details,omitempty"`
	// Stderr is the end of what it wrote there, at most 4 KiB.
	Stderr string `json:"stderr,omitempty"`

	note string
}

// Failed reports whether the plugin did not answer with success.
func (r Report) Failed() bool { return !r.Ended || r.Exit != 0 || r.Signal != 0 }

// Err is the failure of the plugin as an error, nil if it succeeded.
func (r Report) Err() error {
	switch {
	case !r.Failed():
		return nil
	case !r.Ended:
		return fmt.Errorf("plugin %s: it did not answer", r.Plugin)
	case r.Code != 0 || r.Message != "":
		return fmt.Errorf("plugin %s: %w (CNI error code %d)", r.Plugin, &types.Error{Code: r.Code, Msg: r.Message, Details: r.Details}, r.Code)
	default:
		return fmt.Errorf("plugin %s: exit code %d without a CNI error: %s", r.Plugin, r.Exit, strings.TrimSpace(r.Stderr))
	}
}

// Reports are those of the plugins that have been started so far, the chain
// and what its plugins ran, in the order of their start.
func (run *Run) Reports() ([]Report, error) {
	files, err := filepath.Glob(filepath.Join(run.dir, "n*"))
	if err != nil {
		return nil, err
	}
	var reports []Report
	names := make(map[string]string) // of plugins and verbs, by note
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("read what became of a plugin: %w", err)
		}
		report, err := parseNote(data)
		if err != nil {
			return nil, fmt.Errorf("read what became of a plugin: %s: %w", file, err)
		}
		report.note = strings.TrimPrefix(filepath.Base(file), "n")
		names[report.note] = report.Plugin + " " + report.Verb
		reports = append(reports, report)
	}
	for i := range reports {
		if cut := strings.LastIndexByte(reports[i].note, '-'); cut >= 0 {
			reports[i].Parent = names[reports[i].note[:cut]]
		}
	}
	slices.SortStableFunc(reports, func(a, b Report) int { return a.Start.Compare(b.Start) })
	return reports, nil
}

// Verdict is nil if every plugin of the chain has answered with success.
func (run *Run) Verdict(reports []Report) error {
	var errs []error
	answered := 0
	for _, report := range reports {
		if report.Parent == "" {
			answered++
			errs = append(errs, report.Err())
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if answered < len(run.Plugins) {
		return fmt.Errorf("%d of the %d plugins did not run", len(run.Plugins)-answered, len(run.Plugins))
	}
	return nil
}

// parseNote reads what note_start and note_end of runner.c write: the plugin,
// the verb and the start; then, when it has ended, the exit code, the signal,
// the time, and two lengths with the bytes of the answer and of stderr.
func parseNote(data []byte) (Report, error) {
	const atStart, atEnd = 3, 5
	fields := bytes.SplitN(data, []byte{0}, atStart+1)
	if len(fields) <= atStart {
		return Report{Plugin: "?"}, nil // it has only just begun
	}
	r := Report{Plugin: string(fields[0]), Verb: string(fields[1])}
	start, err := strconv.ParseInt(string(fields[2]), 10, 64)
	if err != nil {
		return r, err
	}
	r.Start = time.Unix(0, start)
	rest := bytes.SplitN(fields[atStart], []byte{0}, atEnd+1)
	if len(rest) <= atEnd {
		return r, nil
	}
	var numbers [atEnd]int64
	for i := range numbers {
		if numbers[i], err = strconv.ParseInt(string(rest[i]), 10, 64); err != nil {
			return r, err
		}
	}
	text, answered, written := rest[atEnd], numbers[3], numbers[4]
	if answered < 0 || written < 0 {
		return r, fmt.Errorf("lengths %d and %d", answered, written)
	}
	if left := int64(len(text)) - answered; left < written {
		return r, nil // it was killed as it wrote
	}
	r.Ended, r.Exit, r.Signal, r.Took = true, int(numbers[0]), int(numbers[1]), time.Duration(numbers[2])
	r.answer(text[:answered])
	r.Stderr = string(text[answered : answered+written])
	return r, nil
}

// answer takes the CNI error out of what the plugin wrote, whole or not.
func (r *Report) answer(text []byte) {
	if len(text) == 0 {
		return
	}
	var answer types.Error
	if err := json.Unmarshal(text, &answer); err != nil {
		r.Message = fmt.Sprintf("an answer that is no CNI error: %q", text)
		return
	}
	r.Code, r.Message, r.Details = answer.Code, answer.Msg, answer.Details
}
