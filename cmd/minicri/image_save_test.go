package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A save that fails leaves no file, and its error has no code of gRPC in it.
func TestErrorOfASave(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.tar")
	err := saveArchive(t.Context(), failingSave{}, []string{"none", path}, imageOptions{})
	if err == nil || withoutCode(err).Error() != `image "none": not found` {
		t.Errorf("error: %v", err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("the file: %v", err)
	}
}

type failingSave struct{ nodeImages }

func (failingSave) Save(context.Context, string, io.Writer) error {
	return status.Error(codes.NotFound, `image "none"`)
}
