package timeline

import (
	_ "embed" // the page
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/minicri/minicri/internal/redact"
)

//go:embed page.html
var page string

// pageDocument is the data of the page. Durations are in nanoseconds.
type pageDocument struct {
	Version string    `json:"version"`
	Made    string    `json:"made"`
	Pods    []pagePod `json:"pods"`
}

type pagePod struct {
	Pod
	Begin    string        `json:"begin"`
	Problems []Problem     `json:"problems,omitempty"`
	Episodes []pageEpisode `json:"episodes,omitempty"`
}

type pageEpisode struct {
	Begin string        `json:"begin"`
	Took  time.Duration `json:"took"`
	Lines []pageLine    `json:"lines"`
}

type pageLine struct {
	Name    string        `json:"name"`
	Kind    string        `json:"kind"`
	Sign    string        `json:"sign"`
	Depth   int           `json:"depth"`
	At      time.Duration `json:"at"` // after the beginning of the episode
	Took    time.Duration `json:"took"`
	Failed  bool          `json:"failed"`
	Running bool          `json:"running"`
	Details []string      `json:"details,omitempty"`
}

// HTML writes one page with the lives of pods. It loads nothing from a network. json.Marshal escapes <, > and &, so
// no text of a pod can end the script that contains the data.
func HTML(w io.Writer, pods []Pod, version string) error {
	document := pageDocument{Version: version, Made: time.Now().UTC().Format(timeFormat), Pods: []pagePod{}}
	for _, p := range redact.Lines(pods) {
		document.Pods = append(document.Pods, p.page())
	}
	data, err := json.Marshal(document)
	if err != nil {
		return fmt.Errorf("write the page: %w", err)
	}
	_, err = io.WriteString(w, strings.Replace(page, "/*DATA*/", string(data), 1))
	return err
}

const timeFormat = "2006-01-02 15:04:05.000 UTC"

func (p *Pod) page() pagePod {
	shown := pagePod{Pod: *p, Begin: p.Begin.UTC().Format(timeFormat), Problems: p.Problems()}
	shown.Rows = nil
	for _, e := range p.episodes() {
		part := pageEpisode{Begin: e.begin.UTC().Format(timeFormat), Took: e.took()}
		for _, l := range e.lines {
			sign, _ := l.mark()
			part.Lines = append(part.Lines, pageLine{
				Name: l.name(whole), Kind: l.Kind, Sign: sign, Depth: l.depth, At: l.at().Sub(e.begin), Took: l.Took,
				Failed: l.failed(), Running: l.Running, Details: l.details(),
			})
		}
		shown.Episodes = append(shown.Episodes, part)
	}
	return shown
}
