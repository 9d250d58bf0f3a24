// Command cri writes docs/cri.md: every RPC and every field of the CRI that a
// Linux runtime can meet, how minicri serves it, and the tests that exercise it. The
// list is that of k8s.io/cri-api's own descriptors. Tests say what they set or
// read in their comments, by lines that begin with "cri:" and name RPCs and fields, as
// in "cri: RunPodSandbox PodSandboxConfig.hostname". What is not simply served,
// and why something has no test, is in notes.txt.
package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	_ "k8s.io/cri-api/pkg/apis/runtime/v1" // registers the descriptors
)

func main() {
	page, err := write(".")
	if err != nil {
		fmt.Fprintln(os.Stderr, "cri:", err)
		os.Exit(1)
	}
	_, _ = os.Stdout.Write(page)
}

//go:embed notes.txt
var notesText string

// entry is an RPC, or a message with its fields.
type entry struct {
	name   string
	fields []string // "Message.field"
}

// api are the RPCs and the messages, in the order of the API's own file.
func api() (rpcs, messages []entry, err error) {
	protoregistry.GlobalFiles.RangeFilesByPackage("runtime.v1", func(file protoreflect.FileDescriptor) bool {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				rpcs = append(rpcs, entry{name: string(service.Methods().Get(j).Name())})
			}
		}
		for i := range file.Messages().Len() {
			message := file.Messages().Get(i)
			one := entry{name: string(message.Name())}
			if strings.HasPrefix(one.name, "Windows") {
				continue
			}
			for j := range message.Fields().Len() {
				one.fields = append(one.fields, one.name+"."+string(message.Fields().Get(j).Name()))
			}
			if len(one.fields) > 0 {
				messages = append(messages, one)
			}
		}
		return true
	})
	if len(rpcs) == 0 {
		return nil, nil, fmt.Errorf("no descriptors of runtime.v1")
	}
	return rpcs, messages, nil
}

// annotations are the tests by what they show.
func annotations(root string) (map[string][]string, error) {
	shown := make(map[string][]string)
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && (entry.Name() == "bin" || strings.HasPrefix(entry.Name(), ".") && path != root) {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		directory, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		for _, declaration := range file.Decls {
			if function, ok := declaration.(*ast.FuncDecl); ok {
				annotate(shown, directory, function)
			}
		}
		return nil
	})
	for _, tests := range shown {
		slices.Sort(tests)
	}
	return shown, err
}

// annotate adds what the comment of a test says.
func annotate(shown map[string][]string, directory string, function *ast.FuncDecl) {
	if function.Doc == nil || !strings.HasPrefix(function.Name.Name, "Test") {
		return
	}
	for _, comment := range function.Doc.List {
		names, found := strings.CutPrefix(comment.Text, "// cri: ")
		if !found {
			continue
		}
		for _, name := range strings.Fields(names) {
			shown[name] = append(shown[name], directory+" "+function.Name.Name)
		}
	}
}

// notes are what is to be said of a field or RPC, by its name.
func notes() (map[string]string, error) {
	list := make(map[string]string)
	for line := range strings.Lines(notesText) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, text, found := strings.Cut(line, ": ")
		if !found || list[name] != "" {
			return nil, fmt.Errorf("notes.txt: %q has no note, or two", name)
		}
		list[name] = text
	}
	return list, nil
}

// write makes the page from the sources below a directory.
func write(root string) ([]byte, error) {
	rpcs, messages, err := api()
	if err != nil {
		return nil, err
	}
	shown, err := annotations(root)
	if err != nil {
		return nil, err
	}
	noted, err := notes()
	if err != nil {
		return nil, err
	}
	p := &page{shown: shown, noted: noted, known: make(map[string]bool)}
	for _, rpc := range rpcs {
		p.known[rpc.name] = true
	}
	for _, message := range messages {
		for _, field := range message.fields {
			p.known[field] = true
		}
	}
	if err := p.unknown(); err != nil {
		return nil, err
	}
	p.render(rpcs, messages)
	return p.text.Bytes(), nil
}

// page is the page while it is written.
type page struct {
	shown map[string][]string
	noted map[string]string
	known map[string]bool
	text  bytes.Buffer
}

// unknown fails for a name that the API does not have.
func (p *page) unknown() error {
	for name, tests := range p.shown {
		if !p.known[name] {
			return fmt.Errorf("%s: the API has no %s", strings.Join(tests, ", "), name)
		}
	}
	for name := range p.noted {
		if !p.known[name] {
			return fmt.Errorf("notes.txt: the API has no %s", name)
		}
	}
	return nil
}

func (p *page) render(rpcs, messages []entry) {
	fields, tested := 0, 0
	for _, message := range messages {
		for _, field := range message.fields {
			fields++
			if len(p.shown[field]) > 0 {
				tested++
			}
		}
	}
	fmt.Fprintf(&p.text, introduction, len(rpcs), fields, tested, fields-tested)
	fmt.Fprint(&p.text, "\n## RPCs\n\n| RPC | how | exercised by |\n|---|---|---|\n")
	for _, rpc := range rpcs {
		p.row(rpc.name, rpc.name)
	}
	for _, message := range messages {
		fmt.Fprintf(&p.text, "\n## %s\n\n| field | how | exercised by |\n|---|---|---|\n", message.name)
		for _, field := range message.fields {
			p.row(field, strings.TrimPrefix(field, message.name+"."))
		}
	}
}

const introduction = `<!-- Made by hack/cri: change the annotations of the tests, or hack/cri/notes.txt. -->

# The CRI, field by field

All %d RPCs of k8s.io/cri-api's runtime.v1 and the %d fields of its messages that
are not Windows' own, as its descriptors list them. %d fields have a test that is
named, %d have none; then the note says why. A test is named for what it sets in a
request, or reads of an answer. Tests below test/ go through the daemon with a
real client, tests of server through its gRPC socket; those of other packages ask
the package.
`

func (p *page) row(name, title string) {
	how := p.noted[name]
	if how == "" {
		how = "served"
	}
	tests := p.shown[name]
	if len(tests) == 0 {
		tests = []string{"-"}
	}
	fmt.Fprintf(&p.text, "| %s | %s | %s |\n", title, how, strings.Join(tests, "<br>"))
}
