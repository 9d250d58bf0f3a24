// Command cri writes two pages from the descriptors of k8s.io/cri-api, and compares them with another api.proto:
//
//	cri                     docs/cri.md: RPCs and fields with limits, from notes.txt
//	cri tests               docs/contributors/cri.md: the tests of each RPC and field
//	cri newer FILE|VERSION  the RPCs and fields that only an api.proto has, or one of a version of k8s.io/cri-api
//
// The comments of tests list the RPCs and fields that they set or read, in lines such as
// "cri: RunPodSandbox PodSandboxConfig.hostname".
package main

import (
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
	text, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "cri:", err)
		os.Exit(1)
	}
	_, _ = os.Stdout.WriteString(text)
}

func run(arguments []string) (string, error) {
	if len(arguments) == 2 && arguments[0] == "newer" {
		return newer(arguments[1])
	}
	users, developers, err := write(".")
	if slices.Equal(arguments, []string{"tests"}) {
		return developers, err
	}
	return users, err
}

//go:embed notes.txt
var notesText string

// entry is an RPC, or a message with its fields.
type entry struct {
	name   string
	fields []string // "Message.field"
}

// api returns the RPCs and the messages in the order of the API file.
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

// annotations returns the tests of each RPC and field.
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

// annotate adds the RPCs and fields in the comment of a test.
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

// notes returns the limits of RPCs and fields by name.
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

// write returns the page for users and the page for developers, from the sources below a directory.
func write(root string) (users, developers string, err error) {
	rpcs, messages, err := api()
	if err != nil {
		return "", "", err
	}
	shown, err := annotations(root)
	if err != nil {
		return "", "", err
	}
	noted, err := notes()
	if err != nil {
		return "", "", err
	}
	names, fields := []string{}, 0
	for _, rpc := range rpcs {
		names = append(names, rpc.name)
	}
	for _, message := range messages {
		names = append(names, message.fields...)
		fields += len(message.fields)
	}
	for name := range shown {
		if !slices.Contains(names, name) {
			return "", "", fmt.Errorf("%s: the API has no %s", strings.Join(shown[name], ", "), name)
		}
	}
	for name := range noted {
		if !slices.Contains(names, name) {
			return "", "", fmt.Errorf("notes.txt: the API has no %s", name)
		}
	}
	var limits, tests strings.Builder
	fmt.Fprintf(&limits, forUsers, len(rpcs), fields)
	tests.WriteString(forDevelopers)
	for _, name := range names {
		if noted[name] != "" {
			fmt.Fprintf(&limits, "| %s | %s |\n", name, noted[name])
		}
		fmt.Fprintf(&tests, "| %s | %s |\n", name, strings.Join(shown[name], ", "))
	}
	return limits.String(), tests.String(), nil
}

const (
	forUsers = `# CRI support

<!-- Generated by "make generate" from hack/cri/notes.txt. -->

minicri serves all %d RPCs of the CRI v1, and all %d fields of its messages for Linux, with these limits:

| RPC or field | support |
| --- | --- |
`
	forDevelopers = `# Tests of the CRI

<!-- Generated by "make generate" from the comments of tests. -->

The table lists the tests whose comment names an RPC or a field, because they set it or read it. Nothing measures that
they do. Tests below test/ use the daemon with a real client, tests of server use its gRPC socket, and other tests call
the package.

| RPC or field | tests |
| --- | --- |
`
)
