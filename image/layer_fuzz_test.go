package image

import (
	"bytes"
	"context"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
	hostile "github.com/minicri/minicri/test/hostile/registry"
)

// fuzzStore is a store for many inputs.
func fuzzStore(f *testing.F) *Store {
	harness.Need(f, os.Getuid() == 0, "layers have owners and devices: run this as root")
	// A file of a layer may be as large as what is free, and is written.
	root := f.TempDir()
	must(f, unix.Mount("tmpfs", root, "tmpfs", 0, "size=16m"))
	f.Cleanup(func() { _ = unix.Unmount(root, unix.MNT_DETACH) })
	s, err := Open(context.Background(), Config{Root: root, Logger: slog.New(slog.DiscardHandler)})
	must(f, err)
	f.Cleanup(func() { _ = s.Close() })
	return s
}

// FuzzLayer unpacks what may be a layer, plain or packed: nothing of it is outside of its directory.
func FuzzLayer(f *testing.F) {
	plain := tarOf(f, dir("a"), file("a/b", "1"), hardlink("c", "a/b"), symlink("d", "../../.."), file("d/e", "2"), file("../f", "3"), file(".wh.g", ""), file("a/.wh..wh..opq", ""))
	f.Add(plain)
	f.Add(hostile.Gzip(bytes.NewReader(plain)))
	f.Add(hostile.Zstd(bytes.NewReader(plain), 20))
	f.Add(hostile.Gzip(hostile.Sparse(1 << 40)))
	f.Add(hostile.Zstd(hostile.Zeros(1<<20), 31))
	f.Add(hostile.ZstdSegment(1 << 20)[:64])
	s := fuzzStore(f)
	f.Fuzz(func(t *testing.T, packed []byte) {
		var plain io.Reader = bytes.NewReader(packed)
		if bytes.HasPrefix(packed, []byte{0x28, 0xb5, 0x2f, 0xfd}) {
			// In this process: a decoder that was started is of no use to the fuzzer.
			var decoded limitedBuffer
			if decodeZstd(plain, &decoded) != nil {
				return
			}
			plain = &decoded.Buffer
		} else if unpacked, err := decompress(t.Context(), plain, semaphore.NewWeighted(1)); err != nil {
			return
		} else {
			plain = unpacked
		}
		outside, err := os.MkdirTemp(s.config.Root, "outside")
		must(t, err)
		defer os.RemoveAll(outside)
		root := filepath.Join(outside, "one", "layer")
		must(t, os.MkdirAll(root, 0o700))
		a := applier{store: s}
		_, _ = a.unpack(t.Context(), root, io.LimitReader(plain, 4<<20))
		err = filepath.WalkDir(outside, func(path string, _ fs.DirEntry, err error) error {
			harness.Want(t, err != nil || path == outside || path == filepath.Dir(root) || path == root || strings.HasPrefix(path, root+"/"),
				"outside of the layer: %s", path)
			return nil
		})
		harness.Check(t, err)
	})
}

// limitedBuffer takes some MiB.
type limitedBuffer struct{ bytes.Buffer }

func (b *limitedBuffer) Write(p []byte) (int, error) {
	if b.Len() > 4<<20 {
		return 0, io.ErrShortWrite
	}
	return b.Buffer.Write(p)
}

// FuzzArchive imports what may be an archive of docker save, or an OCI layout: it is imported whole or not at all.
func FuzzArchive(f *testing.F) {
	config := `{"os":"linux","architecture":"` + nodePlatformArch() + `","rootfs":{"type":"layers","diff_ids":["` + someDigest + `"]}}`
	f.Add(tarOf(f, file("layer.tar", string(tarOf(f, file("a", "1")))), file("config.json", config), file("manifest.json", `[{"Config":"config.json","Layers":["layer.tar"],"RepoTags":["a:1"]}]`)))
	f.Add(tarOf(f, file("oci-layout", `{"imageLayoutVersion":"1.0.0"}`), file("index.json", `{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"`+someDigest+`","size":2}]}`), file("blobs/sha256/"+someDigest[7:], "{}")))
	f.Add(tarOf(f, symlink("manifest.json", "/etc/passwd"), file("index.json", "[]")))
	s := fuzzStore(f)
	f.Fuzz(func(t *testing.T, archive []byte) {
		if bytes.HasPrefix(archive, []byte{0x28, 0xb5, 0x2f, 0xfd}) {
			return // FuzzLayer's
		}
		imported, err := s.Import(t.Context(), bytes.NewReader(archive))
		harness.Want(t, err == nil || len(s.List()) == 0, "%v, and there are images", err)
		for _, one := range imported {
			must(t, s.Remove(t.Context(), one.ID))
		}
	})
}
