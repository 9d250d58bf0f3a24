// Command trip is a CNI plugin (CNI SPEC 1.1) that tests put between those of a chain. It makes nothing. It writes
// each ADD and DEL down, and then stumbles if the failpoint "AS VERB" says so: "error" becomes a CNI error, "hang"
// holds the chain there. Built with the tag "failpoints".
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/minicri/minicri/internal/step/failpoint"
)

// config is its part of the network configuration.
type config struct {
	CNIVersion string          `json:"cniVersion"`
	PrevResult json.RawMessage `json:"prevResult"`
	As         string          `json:"as"`     // its name in the chain
	Record     string          `json:"record"` // the file with a line "VERB AS ID" for each run
}

// errorCode is the first that the specification leaves to plugins.
const errorCode = 100

func main() {
	verb := os.Getenv("CNI_COMMAND")
	if verb == "VERSION" {
		fmt.Println(`{"cniVersion": "1.1.0", "supportedVersions": ["1.0.0", "1.1.0"]}`)
		return
	}
	var c config
	if err := run(verb, &c); err != nil {
		answer, _ := json.Marshal(map[string]any{"cniVersion": c.CNIVersion, "code": errorCode, "msg": err.Error()})
		fmt.Println(string(answer))
		os.Exit(1)
	}
}

func run(verb string, c *config) error {
	if err := json.NewDecoder(os.Stdin).Decode(c); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if verb != "ADD" && verb != "DEL" {
		return nil
	}
	if err := c.record(verb, os.Getenv("CNI_CONTAINERID")); err != nil {
		return err
	}
	if err := failpoint.Hit(c.As + " " + verb); err != nil {
		return err
	}
	if verb == "ADD" {
		fmt.Println(c.result())
	}
	return nil
}

func (c *config) record(verb, id string) error {
	file, err := os.OpenFile(c.Record, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(file, verb, c.As, id)
	return errors.Join(err, file.Close())
}

// result hands on what the plugins before it made: nothing, ahead of them.
func (c *config) result() string {
	if len(c.PrevResult) == 0 {
		return `{"cniVersion": "` + c.CNIVersion + `"}`
	}
	return string(c.PrevResult)
}
