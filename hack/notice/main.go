// Command notice writes NOTICE: the modules that are linked into the programs of
// minicri with their licences, copyright lines, NOTICE files and licence texts.
// go list provides the modules and licenseclassifier the licences. The command
// fails for a module without a known licence.
package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	classifier "github.com/google/licenseclassifier/v2"
	"github.com/google/licenseclassifier/v2/assets"
)

// program is something that make install installs.
type program struct{ dir, path, tags, cgo string }

var programs = []program{
	{".", "./cmd/minicri", "grpcnotrace", "0"},
	{".", "./cmd/minicri-shim", "seccomp,runc_nocriu", "1"},
	{"hack/plugins", "tool", "", "0"},
}

// module is a dependency with the contents of its files.
type module struct {
	Path, Version, Dir string

	licences   []string
	copyrights []string
	notices    []string
	texts      []string
}

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "notice:", err)
		os.Exit(1)
	}
}

func run(output io.Writer) error {
	modules := map[string]*module{}
	for _, p := range programs {
		if err := p.modules(modules); err != nil {
			return err
		}
	}
	classifier, err := assets.DefaultClassifier()
	if err != nil {
		return err
	}
	sorted := make([]*module, 0, len(modules))
	for _, m := range modules {
		if err := m.read(classifier); err != nil {
			return err
		}
		sorted = append(sorted, m)
	}
	slices.SortFunc(sorted, func(a, b *module) int {
		return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Version, b.Version))
	})
	return write(output, sorted)
}

// modules adds the modules of the packages that are linked into the program.
func (p program) modules(all map[string]*module) error {
	command := exec.Command("go", "list", "-C", p.dir, "-deps", "-tags", p.tags, "-json=Module", p.path)
	command.Env, command.Stderr = append(os.Environ(), "CGO_ENABLED="+p.cgo, "GOOS=linux", "GOARCH=amd64"), os.Stderr
	out, err := command.Output()
	if err != nil {
		return fmt.Errorf("%v: %w", command, err)
	}
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var pkg struct {
			Module *struct {
				module
				Main bool
			}
		}
		if err := decoder.Decode(&pkg); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if m := pkg.Module; m != nil && !m.Main {
			all[m.Path+" "+m.Version] = &m.module
		}
	}
}

var (
	licenceFile = regexp.MustCompile(`(?i)^(licen[cs]e|copying|unlicense)([.-].*)?$`)
	noticeFile  = regexp.MustCompile(`(?i)^notice([.-].*)?$`)
	copyright   = regexp.MustCompile(`(?im)^[ \t]*(copyright (?:\(c\)|©|[0-9]{4}|the ).*)$`)
)

// read finds the module's licences in the files of its top directory.
func (m *module) read(classifier *classifier.Classifier) error {
	entries, err := os.ReadDir(m.Dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		isLicence, isNotice := licenceFile.MatchString(entry.Name()), noticeFile.MatchString(entry.Name())
		if entry.IsDir() || !isLicence && !isNotice || strings.HasSuffix(entry.Name(), ".go") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(m.Dir, entry.Name()))
		if err != nil {
			return err
		}
		if isNotice {
			m.notices = append(m.notices, strings.TrimSpace(string(text)))
			continue
		}
		m.classify(classifier, text)
	}
	if len(m.licences) == 0 {
		return fmt.Errorf("%s %s: no licence found in %s", m.Path, m.Version, m.Dir)
	}
	slices.Sort(m.licences)
	m.licences = slices.Compact(m.licences)
	return nil
}

func (m *module) classify(classifier *classifier.Classifier, text []byte) {
	onlyApache := true
	for _, match := range classifier.Match(text).Matches {
		if match.MatchType == "License" {
			m.licences = append(m.licences, match.Name)
			onlyApache = onlyApache && match.Name == "Apache-2.0"
		}
	}
	for _, line := range copyright.FindAllStringSubmatch(string(text), -1) {
		if !strings.Contains(line[1], "[") && !strings.Contains(line[1], "{") { // the form at the end of Apache-2.0
			m.copyrights = append(m.copyrights, strings.TrimSpace(line[1]))
		}
	}
	if !onlyApache {
		m.texts = append(m.texts, strings.TrimSpace(strings.ReplaceAll(string(text), "\r\n", "\n")))
	}
}
