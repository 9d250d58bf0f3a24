package runner

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/containernetworking/cni/pkg/types"
)

// Report is what became of one plugin of a run.
type Report struct {
	Plugin, Verb string
	Start        time.Time
	Took         time.Duration
	// Ended is false for a plugin that was killed with its run, or still runs;
	// of what follows Stderr alone is known then.
	Ended bool
	// Exit is its exit code, -1 if it could not be run; Signal the one that ended it
	// instead, or 0.
	Exit   int
	Signal int
	// Code, Message and Details are its CNI error (CNI SPEC, "Error"), or Message says
	// why it could not be run.
	Code             uint
	Message, Details string
	// Answer is the beginning of what it printed when it succeeded, if that is
	// no JSON object and so no result (CNI SPEC, "Success").
	Answer string
	// NoResult is set when what it printed could not be read.
	NoResult bool
	// Stderr is the end of what it wrote there, at most 4 KiB, in printable text.
	Stderr string
}

// end notes what became of a plugin: what it printed, and the error of its process.
func (run *Run) end(r *Report, answer []byte, err error) {
	run.mu.Lock()
	defer run.mu.Unlock()
	r.Took = time.Since(r.Start)
	if run.stderr != nil {
		r.Stderr = printable(run.stderr.now())
		run.stderr = nil
	}
	exit, ran := errors.AsType[*exec.ExitError](err)
	switch {
	case run.killed:
		return
	case ran:
		r.ended(exit.Sys().(syscall.WaitStatus))
		r.answer(answer)
	case err != nil:
		r.Exit, r.Message = -1, err.Error()
	case run.Verb == "ADD" && !bytes.HasPrefix(bytes.TrimSpace(answer), []byte{'{'}):
		r.Answer = string(answer[:min(len(answer), mostShown)])
	}
	r.Ended = true
}

func (r *Report) ended(status syscall.WaitStatus) {
	if status.Signaled() {
		r.Signal = int(status.Signal())
		return
	}
	r.Exit = status.ExitStatus()
}

// Reports are those of the plugins that have been started so far, in that order.
func (run *Run) Reports() []Report {
	run.mu.Lock()
	defer run.mu.Unlock()
	reports := make([]Report, 0, len(run.reports))
	for _, report := range run.reports {
		reports = append(reports, *report)
	}
	if run.stderr != nil {
		reports[len(reports)-1].Stderr = printable(run.stderr.now())
	}
	return reports
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
	}
	said := r.Message
	if said != "" && r.Details != "" {
		said += "; " + r.Details
	}
	switch {
	case r.Signal != 0:
		return without(fmt.Sprintf("it was ended by signal %d (%v)", r.Signal, syscall.Signal(r.Signal)), said, r.Stderr)
	case said == "" && r.Code == 0:
		return without(fmt.Sprintf("exit code %d without a CNI error", r.Exit), r.Stderr, "")
	case said == "":
		return without(fmt.Sprintf("exit code %d, CNI error %d without a message", r.Exit, r.Code), r.Details, r.Stderr)
	default:
		return said
	}
}

// without is a text about a plugin that gave no CNI error, and the first of what it
// said instead, if anything.
func without(text, said, or string) string {
	if said == "" {
		said = strings.TrimSpace(or)
	}
	if said = strings.TrimSpace(said); said == "" {
		return text
	}
	return text + ": " + said
}

// Err is the failure of the plugin as an error, nil if it succeeded.
func (r Report) Err() error {
	switch {
	case !r.Failed():
		return nil
	case r.Ended && r.Code != 0:
		return fmt.Errorf("plugin %s: %w (CNI error code %d)", r.Plugin, &types.Error{Code: r.Code, Msg: r.Message, Details: r.Details}, r.Code)
	default:
		return fmt.Errorf("plugin %s: %s", r.Plugin, r.Text())
	}
}

// Verdict is nil if every plugin of the chain has answered with success.
func (run *Run) Verdict(reports []Report) error {
	var errs []error
	for _, report := range reports {
		errs = append(errs, report.Err())
	}
	if missing := run.Plugins - len(reports); missing > 0 {
		errs = append(errs, fmt.Errorf("%d of the %d plugins did not run", missing, run.Plugins))
	}
	return errors.Join(errs...)
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
