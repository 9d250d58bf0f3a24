// Command protogen compiles a .proto file and has protoc's plugins write the Go
// code for it, as protoc would: the compiler, like the plugins, is a Go module
// and pinned by go.mod.
package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/bufbuild/protocompile"
	"github.com/bufbuild/protocompile/protoutil"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/pluginpb"
	"mvdan.cc/gofumpt/format"
)

const usage = "usage: protogen FILE.proto OUT_DIR PLUGIN..."

func main() {
	if len(os.Args) < 4 {
		fail(usage)
	}
	if err := generate(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fail("protogen: " + err.Error())
	}
}

func fail(message string) {
	fmt.Fprintln(os.Stderr, message)
	os.Exit(1)
}

func generate(source, out string, plugins []string) error {
	compiler := protocompile.Compiler{
		Resolver:       &protocompile.SourceResolver{ImportPaths: []string{filepath.Dir(source)}},
		SourceInfoMode: protocompile.SourceInfoStandard, // comments
	}
	name := filepath.Base(source)
	files, err := compiler.Compile(context.Background(), name)
	if err != nil {
		return err
	}
	request := &pluginpb.CodeGeneratorRequest{FileToGenerate: []string{name}, Parameter: proto.String("paths=source_relative")}
	request.ProtoFile = append(request.ProtoFile, protoutil.ProtoFromFileDescriptor(files[0]))
	for _, plugin := range plugins {
		if err := run(plugin, request, out); err != nil {
			return fmt.Errorf("%s: %w", plugin, err)
		}
	}
	return nil
}

// run speaks the protocol of plugins: a request on stdin, the files on stdout.
func run(plugin string, request *pluginpb.CodeGeneratorRequest, out string) error {
	encoded, err := proto.Marshal(request)
	if err != nil {
		return err
	}
	command := exec.Command(plugin)
	command.Stdin, command.Stderr = bytes.NewReader(encoded), os.Stderr
	answer, err := command.Output()
	if err != nil {
		return err
	}
	response := new(pluginpb.CodeGeneratorResponse)
	if err := proto.Unmarshal(answer, response); err != nil {
		return err
	}
	if response.Error != nil {
		return fmt.Errorf("%s", response.GetError())
	}
	for _, file := range response.File {
		formatted, err := format.Source([]byte(file.GetContent()), format.Options{})
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(out, file.GetName()), formatted, 0o644); err != nil {
			return err
		}
	}
	return nil
}
