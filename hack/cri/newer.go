package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// newer lists the RPCs and fields of another api.proto that this API lacks, one on each line. The source is a file or a
// version of k8s.io/cri-api.
func newer(source string) (string, error) {
	if _, err := os.Stat(source); err != nil {
		dir, err := moduleDir("k8s.io/cri-api@" + source)
		if err != nil {
			return "", err
		}
		source = filepath.Join(dir, "pkg/apis/runtime/v1/api.proto")
	}
	text, err := os.ReadFile(source)
	if err != nil {
		return "", err
	}
	rpcs, messages, err := api()
	if err != nil {
		return "", err
	}
	known := make(map[string]bool)
	for _, entry := range append(rpcs, messages...) {
		known[entry.name] = true
		for _, field := range entry.fields {
			known[field] = true
		}
	}
	var missing strings.Builder
	for _, name := range namesIn(string(text)) {
		if !known[name] {
			fmt.Fprintln(&missing, name)
		}
	}
	return missing.String(), nil
}

func moduleDir(module string) (string, error) {
	output, err := exec.Command("go", "mod", "download", "-json", module).Output()
	var found struct{ Dir, Error string }
	if json.Unmarshal(output, &found) == nil && found.Error != "" {
		return "", fmt.Errorf("%s is no file, and no module: %s", module, found.Error)
	}
	return found.Dir, err
}

// declaration is a line of an api.proto: an RPC, the begin of a message, or a field.
var declaration = regexp.MustCompile(
	`(?m)^\s*(?:rpc (\w+)\(|message (\w+)\s*\{|(?:repeated |optional )?[\w.]+(?:<.*>)? (\w+) = \d+)`)

// namesIn returns the RPCs and the fields ("Message.field") of an api.proto, but those for Windows. Values of enums
// have no type, so that they do not match.
func namesIn(proto string) (names []string) {
	message := ""
	for _, found := range declaration.FindAllStringSubmatch(proto, -1) {
		rpc, begin, field := found[1], found[2], found[3]
		switch {
		case rpc != "":
			names = append(names, rpc)
		case begin != "":
			message = begin
		case !strings.HasPrefix(message, "Windows"):
			names = append(names, message+"."+field)
		}
	}
	return names
}
