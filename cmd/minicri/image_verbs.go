package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/minicri/minicri/image"
)

func importArchive(ctx context.Context, images nodeImages, arguments []string, call imageCall) error {
	archive := call.options.Input
	if path := arguments[0]; path != "-" {
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		defer file.Close()
		archive = file
	}
	imported, err := images.Import(ctx, archive)
	for _, one := range imported {
		fmt.Fprintln(call.options.Output, one.shownNames()[0], one.ID)
	}
	return err
}

// saveArchive removes the file if the archive is not complete.
func saveArchive(ctx context.Context, images nodeImages, arguments []string, call imageCall) error {
	refOrID, path := arguments[0], arguments[1]
	if path == "-" {
		return withoutCode(images.Save(ctx, refOrID, call.options.Output))
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(withoutCode(images.Save(ctx, refOrID, file)), file.Close()); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

func pullImage(ctx context.Context, images nodeImages, arguments []string, call imageCall) error {
	var auth image.Auth
	auth.Username, auth.Password, _ = strings.Cut(call.login, ":")
	lines := newLayerLines(call.options.Output)
	pulled, err := images.Pull(ctx, arguments[0], call.platform, auth, lines.show)
	lines.end()
	if err != nil {
		return err
	}
	fmt.Fprintln(call.options.Output, pulled.ID)
	return nil
}

func inspectImage(ctx context.Context, images nodeImages, arguments []string, call imageCall) error {
	described, err := images.Describe(ctx, arguments[0])
	if err != nil {
		return err
	}
	encoder := json.NewEncoder(call.options.Output)
	encoder.SetIndent("", "  ")
	return encoder.Encode(described)
}

func tagImage(ctx context.Context, images nodeImages, arguments []string, _ imageCall) error {
	return images.Tag(ctx, arguments[0], arguments[1])
}

func untagImage(ctx context.Context, images nodeImages, arguments []string, _ imageCall) error {
	return images.Untag(ctx, arguments[0])
}

func removeImage(ctx context.Context, images nodeImages, arguments []string, _ imageCall) error {
	return images.Remove(ctx, arguments[0])
}
