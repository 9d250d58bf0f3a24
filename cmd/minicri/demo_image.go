package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
)

const (
	// demoImage is the image of the demo's containers, built as the demo runs.
	demoImage = "demo.local/minicri:1"
	// demoBinary is where it has its only file.
	demoBinary = "/minicri"
)

// importImage builds the image and brings it to the node, as `minicri image
// import` does.
func (n *demoNode) importImage(ctx context.Context) error {
	archive, err := buildImage()
	if err != nil {
		return err
	}
	said := &bytes.Buffer{}
	options := imageOptions{Socket: n.socket(), Input: bytes.NewReader(archive), Output: said}
	if err := runImage(ctx, []string{"import", "-"}, options); err != nil {
		return fmt.Errorf("%w: %s", err, said)
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
		"config": map[string]any{"Entrypoint": []string{demoBinary, "demo"}},
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
