package runner

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/step"
)

// Report is what became of one plugin. Of a killed or running one we know only Stderr. Exit is -1 if it could
// not run. A success that is no JSON object, so no result (CNI SPEC, "Success"), has a Message.
type Report struct {
	step.Plugin
	Start time.Time
	Took  time.Duration
}

func (run *Run) end(r *Report, answer []byte, err error) {
	run.mu.Lock()
	defer run.mu.Unlock()
	r.Took, r.Stderr, r.Killed = time.Since(r.Start), run.stderr.String(), run.alive.Err() != nil
	exit, ran := errors.AsType[*exec.ExitError](err)
	switch {
	case r.Killed:
	case ran:
		if status := exit.Sys().(syscall.WaitStatus); status.Signaled() {
			r.Signal = int(status.Signal())
		} else {
			r.Exit = status.ExitStatus()
		}
		r.takeError(answer)
	case err != nil:
		r.Exit, r.Message = -1, err.Error()
	case run.Verb == "ADD" && !bytes.HasPrefix(bytes.TrimSpace(answer), []byte{'{'}):
		r.Message = fmt.Sprintf("what it printed is no CNI result: %.120q", answer)
	case run.Verb == "ADD": // an error with the exit code of success is no result either
		if r.takeError(answer); r.Code == 0 {
			r.Message = ""
		}
	}
}

// takeError reads the CNI error in what the plugin printed.
func (r *Report) takeError(text []byte) {
	var answer types.Error
	switch err := json.Unmarshal(text, &answer); {
	case len(text) == 0:
	case err != nil:
		r.Message = shown(fmt.Sprintf("an answer that is no CNI error: %q", text[:min(len(text), maxShown)]))
	default:
		r.Code, r.Message, r.Details = answer.Code, shown(answer.Msg), shown(answer.Details)
	}
}

// Reports returns those of the plugins started so far, in order.
func (run *Run) Reports() []Report {
	run.mu.Lock()
	defer run.mu.Unlock()
	reports := make([]Report, 0, len(run.reports))
	for _, report := range run.reports {
		reports = append(reports, *report)
	}
	if last := len(reports) - 1; last >= 0 && reports[last].Took == 0 {
		reports[last].Took, reports[last].Stderr = time.Since(reports[last].Start), run.stderr.String()
	}
	return reports
}

// Failed reports whether the plugin did not succeed.
func (r Report) Failed() bool { return r.Killed || r.Exit != 0 || r.Signal != 0 || r.Code != 0 }

// Text returns why the plugin failed, without its name, or "".
func (r Report) Text() string {
	text, said := "", r.Message
	if said != "" && r.Details != "" {
		said += "; " + r.Details
	}
	switch {
	case !r.Failed():
		return said
	case r.Killed:
		text = "it did not answer"
	case r.Signal != 0:
		text = fmt.Sprintf("it was ended by signal %d (%v)", r.Signal, syscall.Signal(r.Signal))
	case said != "":
		return said
	case r.Code != 0:
		text, said = fmt.Sprintf("exit code %d, CNI error %d without a message", r.Exit, r.Code), r.Details
	default:
		text = fmt.Sprintf("exit code %d without a CNI error", r.Exit)
	}
	const lastWords = 300
	words := strings.TrimSpace(r.Stderr)
	if said = cmp.Or(said, strings.ToValidUTF8(words[max(0, len(words)-lastWords):], "")); said != "" {
		text += ": " + said
	}
	return text
}

// Verdict returns nil if every plugin of the chain has succeeded.
func (run *Run) Verdict() error {
	if reports := run.Reports(); len(reports) < run.Plugins || slices.ContainsFunc(reports, Report.Failed) {
		return errors.New("not every plugin of the chain has succeeded")
	}
	return nil
}

// maxShown limits a plugin's words in an error: the kubelet makes an event of at most 1 KiB of it.
const maxShown = 700

func shown(text string) string {
	if text = redact.Printable(text); len(text) <= maxShown {
		return text
	}
	return fmt.Sprintf("%s... (%d bytes)", strings.ToValidUTF8(text[:maxShown], ""), len(text))
}
