package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"runtime"
)

const (
	// demoImage is the image of the demo's containers, built as the demo runs.
	demoImage = "demo.local/demo:1"
	// demoBinary is the path of the image's only file, this program.
	demoBinary = "/demo"
)

// importImage builds the image and imports it with `minicri image import`.
func (n *demoNode) importImage(ctx context.Context) error {
	archive, err := buildImage()
	if err != nil {
		return err
	}
	command := exec.CommandContext(ctx, n.minicri(), "image", "--state", n.path("state"), "import", "-")
	command.Stdin = bytes.NewReader(archive)
	if out, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w: %s", command, err, out)
	}
	return nil
}

// buildImage makes an image of this program alone, as docker save writes it.
func buildImage() ([]byte, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	program, err := os.ReadFile(self)
	if err != nil {
		return nil, err
	}
	layer, err := tarOf(file{demoBinary[1:], 0o755, program})
	if err != nil {
		return nil, err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Entrypoint": []string{demoBinary}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}},
	})
	if err != nil {
		return nil, err
	}
	manifest, err := json.Marshal([]any{map[string]any{
		"Config": "config.json", "RepoTags": []string{demoImage}, "Layers": []string{"layer.tar"},
	}})
	if err != nil {
		return nil, err
	}
	return tarOf(file{"manifest.json", 0o644, manifest}, file{"config.json", 0o644, config}, file{"layer.tar", 0o644, layer})
}

// file is a file of a tar archive.
type file struct {
	name    string
	mode    int64
	content []byte
}

func tarOf(files ...file) ([]byte, error) {
	archive := &bytes.Buffer{}
	writer := tar.NewWriter(archive)
	for _, f := range files {
		if err := writer.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: f.mode, Size: int64(len(f.content))}); err != nil {
			return nil, err
		}
		if _, err := writer.Write(f.content); err != nil {
			return nil, err
		}
	}
	err := writer.Close()
	return archive.Bytes(), err
}
