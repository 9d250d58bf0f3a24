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
	"unicode"

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
	// of what follows Stderr alone is known then.
	Ended bool `json:"ended"`
	// Exit is its exit code; Signal the one that ended it instead, or 0.
	Exit   int `json:"exit"`
	Signal int `json:"signal,omitempty"`
	// Code, Message and Details are its CNI error (CNI SPEC, "Error").
	Code    uint   `json:"code,omitempty"`
	Message string `json:"message,omitempty"`
	Details string `json:"details,omitempty"`
	// Answer is the beginning of what it printed when it succeeded, if that is
	// no JSON object and so no result (CNI SPEC, "Success").
	Answer string `json:"answer,omitempty"`
	// NoResult is set when what it printed could not be read.
	NoResult bool `json:"noResult,omitempty"`
	// Stderr is the end of what it wrote there, at most 4 KiB, in printable text.
	Stderr string `json:"stderr,omitempty"`

	note string
}

// Failed reports whether the plugin did not answer with success.
func (r Report) Failed() bool { return !r.Ended || r.Exit != 0 || r.Signal != 0 }

// Text says why the plugin failed, without its name; "" if it did not.
func (r Report) Text() string {
	switch {
	case r.Answer != "":
		return fmt.Sprintf("it printed what is no CNI result: %.100q", r.Answer)
	case !r.Failed():
		return ""
	case !r.Ended && r.Stderr != "":
		return fmt.Sprintf("it did not answer; the last that it wrote to stderr: %q", r.LastWords())
	case !r.Ended:
		return "it did not answer"
	case r.Message != "" && r.Details != "":
		return r.Message + "; " + r.Details
	case r.Message != "" || r.Code != 0:
		return r.Message
	default:
		return strings.TrimSpace(fmt.Sprintf("exit code %d without a CNI error: %s", r.Exit, strings.TrimSpace(r.Stderr)))
	}
}

// Err is the failure of the plugin as an error, nil if it succeeded.
func (r Report) Err() error {
	switch {
	case !r.Failed():
		return nil
	case r.Ended && (r.Code != 0 || r.Message != ""):
		return fmt.Errorf("plugin %s: %w (CNI error code %d)", r.Plugin, &types.Error{Code: r.Code, Msg: r.Message, Details: r.Details}, r.Code)
	default:
		return fmt.Errorf("plugin %s: %s", r.Plugin, r.Text())
	}
}

// Innermost are the reports of those that failed and called none that failed: a
// plugin says again what its IPAM plugin said. An IPAM plugin that printed no
// result is one of them when its caller failed.
func Innermost(reports []Report) []Report {
	failed := func(r Report) bool { return r.Failed() || r.Answer != "" && r.Parent != "" }
	return slices.DeleteFunc(slices.Clone(reports), func(r Report) bool {
		return !failed(r) || slices.ContainsFunc(reports, func(other Report) bool {
			return failed(other) && strings.HasPrefix(other.note, r.note+"-")
		})
	})
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
		if !report.Ended {
			written, _ := os.ReadFile(filepath.Join(run.dir, "e"+report.note)) // none if it wrote nothing
			report.Stderr = printable(written)
		}
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
	if r.Exit == 0 && r.Signal == 0 {
		r.Answer = string(text[:answered])
	} else {
		r.answer(text[:answered])
	}
	r.Stderr = printable(text[answered : answered+written])
	return r, nil
}

// printable is text that may stand in an error and in a gRPC status, which take
// UTF-8 only; lines stay.
func printable(text []byte) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, strings.ToValidUTF8(string(text), string(unicode.ReplacementChar)))
}

// LastWords are the last lines that it wrote to stderr, for an error's text; "" if
// there are none.
func (r Report) LastWords() string {
	const most = 300
	text := strings.TrimSpace(r.Stderr)
	if cut := len(text) - most; cut > 0 {
		text = "..." + strings.ToValidUTF8(text[cut:], "")
	}
	return text
}

// answer takes the CNI error out of what the plugin wrote, whole or not.
func (r *Report) answer(text []byte) {
	if len(text) == 0 {
		return
	}
	var answer types.Error
	if err := json.Unmarshal(text, &answer); err != nil {
		r.Message = fmt.Sprintf("an answer that is no CNI error: %.*q", mostShown, text)
		return
	}
	r.Code, r.Message, r.Details = answer.Code, shown(answer.Msg), shown(answer.Details)
}

// mostShown is how much of a plugin's words an error has: the kubelet makes an
// event of it, of at most 1 KiB, which is to say what to do, too.
const mostShown = 700

func shown(text string) string {
	text = printable([]byte(text))
	if len(text) <= mostShown {
		return text
	}
	return fmt.Sprintf("%s... (%d bytes)", strings.ToValidUTF8(text[:mostShown], ""), len(text))
}
