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

	"github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/pelletier/go-toml/v2"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
	hostile "github.com/minicri/minicri/test/hostile/registry"
)

const someDigest = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"

// FuzzManifest: whatever passes has digests that are safe in a path, and sizes and numbers within the limits.
func FuzzManifest(f *testing.F) {
	f.Add([]byte(`{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"` + strings.Replace(someDigest, "4", "5", 1) + `","size":2},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"` + someDigest + `","size":7}]}`))
	f.Add([]byte(`{"config":{"digest":"sha256:../../etc/passwd","size":-1},"layers":null}`))
	f.Add([]byte(`{"artifactType":"x","config":{"mediaType":"application/vnd.oci.empty.v1+json","digest":"` + someDigest + `","size":2}}`))
	f.Add([]byte(`[]`))
	f.Add([]byte(`{"schemaVersion":2,"manifests":[{"digest":"` + someDigest + `","size":7}],"layers":[]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		_, err := parseIndex(data)
		harness.Want(t, err == nil || errdefs.IsInvalidArgument(err), "no kind: %v", err)
		manifest, err := parseManifest(data, ocispec.MediaTypeImageManifest)
		if err != nil {
			harness.Want(t, errdefs.IsInvalidArgument(err) || errdefs.IsNotImplemented(err), "no kind: %v", err)
			return
		}
		harness.Want(t, len(manifest.Layers) <= maxLayers && manifest.Config.Size <= maxConfig,
			"%d layers, a configuration of %d bytes", len(manifest.Layers), manifest.Config.Size)
		for _, blob := range append(manifest.Layers, manifest.Config) {
			harness.Want(t, strings.HasPrefix(blob.Digest.String(), "sha256:"), "let in: %+v", blob)
			harness.Want(t, !strings.ContainsAny(blob.Digest.String(), "/."), "let in: %+v", blob)
			harness.Want(t, blob.Size > 0, "let in: %+v", blob)
		}
	})
}

// FuzzHosts: the library takes every host of a file that is accepted.
func FuzzHosts(f *testing.F) {
	for _, spoilt := range spoiltHosts {
		f.Add([]byte(spoilt.text))
	}
	f.Add([]byte("server = \"a.example\"\nca = [\"x\"]\n[host.\"https://b.example\"]\nclient = [[\"x\", \"y\"]]\n[host.\"c.example\".header]\na = \"b\"\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if checkHosts(data) != nil || len(data) == 0 {
			return
		}
		var file hostsFile
		must(t, toml.Unmarshal(data, &file))
		certs := t.TempDir()
		must(t, os.WriteFile(filepath.Join(certs, hostsFileName), data, 0o600))
		hosts, err := config.ConfigureHosts(t.Context(), config.HostOptions{HostDir: func(string) (string, error) { return certs, nil }})("a.example")
		harness.Want(t, err != nil || len(hosts) >= len(file.Hosts)+1, "%d of %d hosts were taken", len(hosts), len(file.Hosts)+1)
	})
}

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
		} else if unpacked, err := decompress(t.Context(), plain, &place{places: newPlaces()}); err != nil {
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
