package registry

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"io"
	"strings"
)

// Zeros is a plain layer with one file of size zero bytes, as a stream.
func Zeros(size int64) io.Reader {
	header := head(&tar.Header{Name: "zeros", Typeflag: tar.TypeReg, Mode: 0o644, Size: size})
	return io.MultiReader(bytes.NewReader(header), io.LimitReader(zeros{}, (size+511)/512*512+1024))
}

// Sparse is a plain layer of some KiB, with one file of size bytes of which all are a
// hole (GNU tar's sparse format 1.0).
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

// LongHeaders is a plain layer of count directories, each of which has a comment of
// just under 1 MiB.
func LongHeaders(count int) io.Reader {
	entry := func(i int) []byte {
		return head(&tar.Header{
			Name: fmt.Sprint(i), Typeflag: tar.TypeDir, Mode: 0o755, Format: tar.FormatPAX,
			PAXRecords: map[string]string{"comment": strings.Repeat("x", 1<<20-1000)},
		})
	}
	readers := make([]io.Reader, 0, count+1)
	for i := range count {
		readers = append(readers, &later{make: func() []byte { return entry(i) }})
	}
	return io.MultiReader(append(readers, io.LimitReader(zeros{}, 1024))...)
}

// later makes its bytes when they are read.
type later struct {
	make func() []byte
	left *bytes.Reader
}

func (l *later) Read(p []byte) (int, error) {
	if l.left == nil {
		l.left = bytes.NewReader(l.make())
	}
	return l.left.Read(p)
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

// Zstd packs a layer into one frame that wants a window of 1<<windowLog bytes
// (RFC 8878). What repeats one byte becomes a block of 4 bytes.
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

// ZstdSegment is a frame of one segment, which wants as much memory as it says that
// it holds.
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
