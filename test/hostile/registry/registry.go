// Package registry is an image registry for attacks: it serves what it is given, however wrong, over HTTP,
// and lets a hook answer in its place. It keeps all in memory and checks nothing.
package registry

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Registry is an http.Handler. Its methods may be called while it serves.
type Registry struct {
	mu        sync.Mutex // guards what follows
	blobs     map[digest.Digest][]byte
	manifests map[string]manifest // by repository and tag or digest
	hook      Hook
}

type manifest struct {
	mediaType string
	data      []byte
}

// Hook answers a request in the registry's place, or returns false.
type Hook func(w http.ResponseWriter, r *http.Request) bool

// New is a registry without content.
func New() *Registry {
	return &Registry{blobs: map[digest.Digest][]byte{}, manifests: map[string]manifest{}}
}

// Answer sets the hook; nil is none.
func (r *Registry) Answer(hook Hook) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hook = hook
}

// Blob stores bytes and describes them.
func (r *Registry) Blob(mediaType string, data []byte) ocispec.Descriptor {
	r.mu.Lock()
	defer r.mu.Unlock()
	d := digest.FromBytes(data)
	r.blobs[d] = data
	return ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(data))}
}

// Manifest names a manifest or an index, repository:tag, and describes it.
func (r *Registry) Manifest(name, mediaType string, content any) ocispec.Descriptor {
	data, err := json.Marshal(content)
	must(err)
	repository, tag, _ := strings.Cut(name, ":")
	d := digest.FromBytes(data)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, reference := range []string{tag, d.String()} {
		r.manifests[repository+"/"+reference] = manifest{mediaType: mediaType, data: data}
	}
	return ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(data))}
}

// ServeHTTP answers what a pull asks for (distribution-spec, "Pull").
func (r *Registry) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	r.mu.Lock()
	hook := r.hook
	r.mu.Unlock()
	if hook != nil && hook(w, request) {
		return
	}
	path := strings.TrimPrefix(request.URL.Path, "/v2/")
	repository, reference, _ := strings.Cut(path, "/manifests/")
	_, name, _ := strings.Cut(path, "/blobs/")
	r.mu.Lock()
	data, found := r.blobs[digest.Digest(name)]
	m, isManifest := r.manifests[repository+"/"+reference]
	r.mu.Unlock()
	switch {
	case isManifest:
		data = m.data
		w.Header().Set("Content-Type", m.mediaType)
		w.Header().Set("Docker-Content-Digest", digest.FromBytes(data).String())
	case !found:
		http.NotFound(w, request)
		return
	}
	http.ServeContent(w, request, "", time.Time{}, bytes.NewReader(data))
}

// Layer is an uncompressed layer of the given entries; Body is what a regular file holds.
func Layer(entries ...Entry) []byte {
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	for _, e := range entries {
		e.Header.Size = int64(len(e.Body))
		must(w.WriteHeader(&e.Header))
		_, err := w.Write([]byte(e.Body))
		must(err)
	}
	must(w.Close())
	return buffer.Bytes()
}

// Entry is one of a layer.
type Entry struct {
	Header tar.Header
	Body   string
}

// File is a regular file.
func File(name string, mode int64, body string) Entry {
	return Entry{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode}, body}
}

// Dir is a directory of the user and group with one number.
func Dir(name string, mode int64, id int) Entry {
	return Entry{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: mode, Uid: id, Gid: id}, ""}
}

// Device is a character device.
func Device(name string, mode, major, minor int64) Entry {
	return Entry{tar.Header{Name: name, Typeflag: tar.TypeChar, Mode: mode, Devmajor: major, Devminor: minor}, ""}
}

// Image stores configuration and layers of an image for this machine and returns its manifest, for a test to
// spoil and to name.
func (r *Registry) Image(config ocispec.ImageConfig, layers ...[]byte) ocispec.Manifest {
	var diffIDs []digest.Digest
	manifest := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest}
	for _, layer := range layers {
		diffIDs = append(diffIDs, digest.FromBytes(layer))
		manifest.Layers = append(manifest.Layers, r.Blob(ocispec.MediaTypeImageLayer, layer))
	}
	data, err := json.Marshal(ocispec.Image{
		Platform: ocispec.Platform{OS: "linux", Architecture: runtime.GOARCH},
		Config:   config, RootFS: ocispec.RootFS{Type: "layers", DiffIDs: diffIDs},
	})
	must(err)
	manifest.Config = r.Blob(ocispec.MediaTypeImageConfig, data)
	return manifest
}

// Zeros is a plain layer with one file of size zero bytes, as a stream.
func Zeros(size int64) io.Reader {
	header := head(&tar.Header{Name: "zeros", Typeflag: tar.TypeReg, Mode: 0o644, Size: size})
	return io.MultiReader(bytes.NewReader(header), io.LimitReader(zeros{}, (size+511)/512*512+1024))
}

// Sparse is a plain layer of some KiB, with one file of size bytes of which all are a hole (GNU tar's sparse
// format 1.0).
func Sparse(size int64) io.Reader {
	const noData = "0\n" // of its map: it has no fragments
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	// The writer of the standard library refuses these records: they are put in after.
	hole := &tar.Header{Name: "hole", Typeflag: tar.TypeReg, Mode: 0o644, Size: 512, PAXRecords: map[string]string{
		"XXX.sparse.major": "1", "XXX.sparse.minor": "0", "XXX.sparse.name": "hole", "XXX.sparse.realsize": fmt.Sprint(size),
	}}
	must(w.WriteHeader(hole))
	_, err := w.Write(append([]byte(noData), make([]byte, 512-len(noData))...))
	must(err)
	must(w.Close())
	return bytes.NewReader(bytes.ReplaceAll(buffer.Bytes(), []byte("XXX."), []byte("GNU.")))
}

// EmptyFiles is a plain layer of count files without content.
func EmptyFiles(count int) io.Reader {
	var buffer bytes.Buffer
	for i := range count {
		buffer.Write(head(&tar.Header{Name: fmt.Sprint(i), Typeflag: tar.TypeReg, Mode: 0o644}))
	}
	return io.MultiReader(&buffer, io.LimitReader(zeros{}, 1024))
}

// LongHeaders is a plain layer of count directories, each of which has a comment of just under 1 MiB. It has to
// be read to its end.
func LongHeaders(count int) io.Reader {
	r, w := io.Pipe()
	go func() {
		for i := range count {
			_, _ = w.Write(head(&tar.Header{
				Name: fmt.Sprint(i), Typeflag: tar.TypeDir, Mode: 0o755, Format: tar.FormatPAX,
				PAXRecords: map[string]string{"comment": strings.Repeat("x", 1<<20-1000)},
			}))
		}
		_, _ = w.Write(make([]byte, 1024))
		_ = w.Close()
	}()
	return r
}

// head is the header of an entry alone.
func head(header *tar.Header) []byte {
	var buffer bytes.Buffer
	must(tar.NewWriter(&buffer).WriteHeader(header))
	return buffer.Bytes()
}

// Gzip compresses a layer.
func Gzip(plain io.Reader) []byte {
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, err := io.Copy(w, plain)
	must(err)
	must(w.Close())
	return packed.Bytes()
}

// Zstd packs a layer into one frame that wants a window of 1<<windowLog bytes (RFC 8878). What repeats one
// byte becomes a block of 4 bytes.
func Zstd(plain io.Reader, windowLog int) []byte {
	packed := []byte{0x28, 0xb5, 0x2f, 0xfd, 0, byte(windowLog-10) << 3}
	for block := make([]byte, 64<<10); ; {
		n, err := io.ReadFull(plain, block)
		content := block[:n]
		if n > 0 && bytes.Count(content, content[:1]) == n {
			packed = append(packed, blockHeader(1, n)...)
			packed = append(packed, content[0])
		} else {
			packed = append(append(packed, blockHeader(0, n)...), content...)
		}
		if err != nil {
			return append(packed, 1, 0, 0) // the last block, of nothing
		}
	}
}

// ZstdSegment is a frame of one segment, which wants as much memory as it says that it holds.
func ZstdSegment(size uint64) []byte {
	packed := []byte{0x28, 0xb5, 0x2f, 0xfd, 0xe0}
	packed = binary.LittleEndian.AppendUint64(packed, size)
	for ; size > 0; size -= min(size, 64<<10) {
		packed = append(append(packed, blockHeader(1, int(min(size, 64<<10)))...), 0)
	}
	return append(packed, 1, 0, 0)
}

func blockHeader(kind, size int) []byte {
	header := binary.LittleEndian.AppendUint32(nil, uint32(kind)<<1|uint32(size)<<3)
	return header[:3]
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func must(err error) {
	if err != nil {
		panic(err) // a mistake in the test
	}
}
