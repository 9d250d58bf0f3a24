package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// item is an entry of a layer as a builder writes it.
type item struct {
	tar.Header
	data string
}

func regular(name string, mode int64, uid, gid int, data string) item {
	return item{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode, Uid: uid, Gid: gid, ModTime: time.Unix(1, 0)}, data}
}

func folder(name string, mode int64, uid, gid int) item {
	return item{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: mode, Uid: uid, Gid: gid, ModTime: time.Unix(315532800, 0)}, ""}
}

func special(name string, kind byte, link string) item {
	return item{tar.Header{Name: name, Typeflag: kind, Linkname: link, Mode: 0o777, Devmajor: 1, Devminor: 3, ModTime: time.Unix(1, 0)}, ""}
}

func attributed(i item, records map[string]string) item {
	i.PAXRecords = records
	return i
}

// written is a tar in a form; tar.FormatUnknown has the library choose.
func written(t *testing.T, format tar.Format, items ...item) []byte {
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	for _, i := range items {
		i.Format, i.Size = format, int64(len(i.data))
		must(t, w.WriteHeader(&i.Header))
		_, err := w.Write([]byte(i.data))
		must(t, err)
	}
	must(t, w.Close())
	return buffer.Bytes()
}

// raw is an entry that no library writes any more: fields by their offset in the header.
func raw(name string, kind byte, data []byte, fields map[int]string) []byte {
	block := make([]byte, 512)
	for at, text := range map[int]string{0: name, 100: "0000644\x00", 108: "0000000\x00", 116: "0000000\x00", 124: fmt.Sprintf("%011o\x00", len(data)),
		136: "00000000001\x00", 148: "        ", 156: string(kind), 257: "ustar  \x00"} {
		copy(block[at:], text)
	}
	for at, text := range fields {
		copy(block[at:], text)
	}
	sum := 0
	for _, b := range block {
		sum += int(b)
	}
	copy(block[148:], fmt.Sprintf("%06o\x00 ", sum))
	return append(append(block, data...), make([]byte, (512-len(data)%512)%512)...)
}

// oldSparse is GNU tar's old form of a file of 8 KiB with a hole before and behind three bytes.
func oldSparse(name string) []byte {
	octal := func(n int) string { return fmt.Sprintf("%011o\x00", n) }
	return raw(name, 'S', []byte("abc"), map[int]string{386: octal(4096), 398: octal(3), 410: octal(8192), 422: octal(0), 483: octal(8192)})
}

func ended(parts ...[]byte) []byte { return append(bytes.Join(parts, nil), make([]byte, 1024)...) }

// packing is how a layer is stored.
type packing struct {
	mediaType   string
	pack        func(plain []byte) []byte
	annotations map[string]string
}

func gzipMembers(plain []byte) []byte { // as estargz: each part of its own, and a footer
	var buffer bytes.Buffer
	for len(plain) > 0 {
		n := min(len(plain), 1024)
		w, _ := gzip.NewWriterLevel(&buffer, gzip.BestCompression)
		_, _ = w.Write(plain[:n])
		_ = w.Close()
		plain = plain[n:]
	}
	footer, _ := gzip.NewWriterLevel(&buffer, gzip.NoCompression)
	footer.Extra = []byte("SG\x16\x00" + "0000000000000000STARGZ")
	_ = footer.Close()
	return buffer.Bytes()
}

func gzipWithZeros(plain []byte) []byte { return append(gzipMembers(plain), make([]byte, 700)...) }

func zstdChunks(plain []byte) []byte { // as zstd:chunked: frames, and a skippable one with a table
	w, _ := zstd.NewWriter(nil)
	var all []byte
	for len(plain) > 0 {
		n := min(len(plain), 1024)
		all = w.EncodeAll(plain[:n], all)
		plain = plain[n:]
	}
	all = append(all, 0x50, 0x2a, 0x4d, 0x18)
	return append(binary.LittleEndian.AppendUint32(all, 9), "a manifest"[:9]...)
}

func skippableFirst(plain []byte) []byte {
	return append([]byte{0x51, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 'h', 'i'}, zstdChunks(plain)...)
}

func asItIs(plain []byte) []byte { return plain }

var packings = []packing{
	{ocispec.MediaTypeImageLayerGzip, gzipMembers, map[string]string{"containerd.io/snapshot/stargz/toc.digest": "sha256:0", "io.containers.estargz.uncompressed-size": "1"}},
	{ocispec.MediaTypeImageLayer, asItIs, nil},
	{ocispec.MediaTypeImageLayer, gzipMembers, nil}, // buildah, for years
	{ocispec.MediaTypeImageLayer, zstdChunks, nil},
	{ocispec.MediaTypeImageLayerZstd, zstdChunks, map[string]string{"io.github.containers.zstd-chunked.manifest-checksum": "sha256:0", "io.github.containers.zstd-chunked.manifest-position": "1:2:3:1"}},
	{ocispec.MediaTypeImageLayerZstd, skippableFirst, nil},
	{ocispec.MediaTypeImageLayerGzip, zstdChunks, nil}, // a type that was not changed with the bytes
	{ocispec.MediaTypeImageLayerGzip, asItIs, nil},
	{ocispec.MediaTypeImageLayerGzip, gzipWithZeros, nil},
	{"application/vnd.docker.image.rootfs.diff.tar.gzip", gzipMembers, nil},
	{"application/vnd.docker.image.rootfs.diff.tar", gzipMembers, nil},
	{"application/vnd.docker.image.rootfs.diff.tar.zstd", zstdChunks, nil},
	{ocispec.MediaTypeImageLayerNonDistributableGzip, gzipMembers, nil}, //nolint:staticcheck // images have them
	{"application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", gzipMembers, nil},
}

const capability = "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" // cap_net_bind_service=ep

// corpus is what builders make of a root file system: layers as plain tars, bottom first.
func corpus(t *testing.T) map[string][][]byte {
	long := strings.Repeat("long/", 60) + strings.Repeat("n", 200)
	base := written(t, tar.FormatPAX, folder("etc/", 0o755, 0, 0), regular("etc/passwd", 0o644, 0, 0, "root:x:0:0::/:\n"), folder("d/", 0o750, 5, 6), regular("d/old", 0o600, 5, 6, "old"),
		folder("d/sub/", 0o711, 7, 8), regular("d/sub/old", 0o644, 7, 8, "old"), regular("f", 0o644, 0, 0, "old"), special("link", tar.TypeSymlink, "d"), folder("empty/", 0o700, 0, 0))
	empty := make([]byte, 1024)
	return map[string][][]byte{
		"kaniko: no whiteout is its own layer's": {base, written(t, tar.FormatGNU, regular("/f", 0o755, 0, 0, "new"), folder("/", 0o755, 0, 0), regular("etc/.wh.passwd", 0, 0, 0, ""), folder("d/", 0o700, 1, 1),
			regular("f", 0o700, 2, 2, "newer"))},
		"buildkit: times, PAX, an empty layer": {base, empty, written(t, tar.FormatPAX, item{tar.Header{Name: "t", Typeflag: tar.TypeReg, Mode: 0o644, ModTime: time.Unix(1700000000, 123456789), AccessTime: time.Unix(1600000000, 0), ChangeTime: time.Unix(1, 0)}, "x"}), empty},
		"ko: no directories":                   {written(t, tar.FormatUSTAR, regular("ko-app/deep/app", 0o555, 0, 0, "elf"), regular("var/run/ko/LICENSE", 0o644, 0, 0, "l"))},
		"jib: a directory each time": {base, written(t, tar.FormatUSTAR, folder("app/", 0o755, 0, 0), folder("app/libs/", 0o755, 0, 0), regular("app/libs/a.jar", 0o644, 0, 0, "a")),
			written(t, tar.FormatUSTAR, folder("app/", 0o755, 9, 9), folder("app/classes/", 0o755, 0, 0), regular("app/classes/A.class", 0o644, 0, 0, "b"))},
		"bazel: ./ and absolute names": {written(t, tar.FormatGNU, folder("./", 0o700, 3, 3), folder("./opt/", 0o755, 0, 0), regular("./opt/a", 0o644, 0, 0, "a"), regular("/opt/b", 0o644, 0, 0, "b"), regular("opt//c", 0o644, 0, 0, "c"), regular("opt/./x/../d", 0o644, 0, 0, "d"))},
		"nix: read-only directories, links": {written(t, tar.FormatGNU, folder("nix/store/", 0o1775, 0, 30000), folder("nix/store/a/", 0o555, 0, 0), regular("nix/store/a/f", 0o444, 0, 0, "f"), special("nix/store/a/g", tar.TypeLink, "nix/store/a/f"),
			special("bin", tar.TypeSymlink, "/nix/store/a"), special("dangling", tar.TypeSymlink, "../../../none"), special("nix/store/a/loop", tar.TypeSymlink, "loop"))},
		"podman: attributes, devices": {written(t, tar.FormatPAX, attributed(regular("ping", 0o755, 0, 0, "p"), map[string]string{"SCHILY.xattr.security.capability": capability, "SCHILY.xattr.user.a": "b\x00c"}),
			attributed(folder("dir/", 0o2755, 1, 2), map[string]string{"SCHILY.xattr.user.d": "e"}), special("null", tar.TypeChar, ""), special("block", tar.TypeBlock, ""), special("fifo", tar.TypeFifo, ""),
			regular("suid", 0o6755, 1000, 1000, "s"), regular("none", 0, 0, 0, "n"))},
		"podman: capabilities of a file that is replaced": {written(t, tar.FormatPAX, attributed(regular("ping", 0o755, 0, 0, "p"), map[string]string{"SCHILY.xattr.security.capability": capability})), written(t, tar.FormatPAX, regular("ping", 0o755, 0, 0, "q"))},
		"buildpacks: owners, the same layer twice":        {base, written(t, tar.FormatPAX, folder("layers/", 0o755, 1000, 1001), regular("layers/x", 0o644, 1000, 1001, "x")), base, written(t, tar.FormatPAX, folder("layers/", 0o755, 1000, 1001), regular("layers/x", 0o644, 1000, 1001, "x"))},
		"umoci: whiteouts before":                         {base, written(t, tar.FormatPAX, regular(".wh.f", 0o644, 0, 0, ""), regular("d/.wh.sub", 0, 0, 0, ""), folder("d/sub/", 0o700, 0, 0), regular("d/sub/new", 0o644, 0, 0, "new"), regular(".wh.none", 0, 0, 0, ""))},
		"whiteouts: opaque first":                         {base, written(t, tar.FormatPAX, folder("d/", 0o755, 0, 0), regular("d/.wh..wh..opq", 0, 0, 0, ""), regular("d/new", 0o644, 0, 0, "new"))},
		"whiteouts: opaque last":                          {base, written(t, tar.FormatPAX, folder("d/", 0o755, 0, 0), regular("d/new", 0o644, 0, 0, "new"), folder("d/n/", 0o755, 0, 0), regular("d/n/new", 0o644, 0, 0, "new"), regular("d/.wh..wh..opq", 0, 0, 0, ""))},
		"whiteouts: of all, of a link, of AUFS":           {base, written(t, tar.FormatPAX, regular(".wh.link", 0, 0, 0, ""), regular(".wh..wh.aufs", 0, 0, 0, ""), folder(".wh..wh.orph/", 0o700, 0, 0)), written(t, tar.FormatPAX, regular(".wh..wh..opq", 0, 0, 0, ""), regular("last", 0o644, 0, 0, ""))},
		"a file over a directory and back":                {base, written(t, tar.FormatPAX, regular("d", 0o644, 0, 0, "file"), folder("f/", 0o755, 0, 0), regular("f/x", 0o644, 0, 0, "x")), written(t, tar.FormatPAX, folder("d/", 0o755, 0, 0), special("f", tar.TypeSymlink, "d"))},
		"through a link to a directory":                   {base, written(t, tar.FormatPAX, regular("link/through", 0o644, 0, 0, "x"))},
		"apko: large owners, GNU numbers":                 {written(t, tar.FormatGNU, regular("big", 0o644, 4000000, 3000000, "x"), folder("home/", 0o755, 65532, 65532), special("home/h", tar.TypeSymlink, "/big"))},
		"hard links within and across layers":             {base, written(t, tar.FormatPAX, regular("a", 0o644, 0, 0, "a"), special("b", tar.TypeLink, "a"), special("c", tar.TypeLink, "./b"), special("e", tar.TypeLink, "/etc/passwd")), written(t, tar.FormatPAX, regular("a", 0o600, 0, 0, "A"), special("d/h", tar.TypeLink, "f"))},
		"long names":                                      {written(t, tar.FormatGNU, regular(long, 0o644, 0, 0, "g"), special("to-long", tar.TypeSymlink, long)), written(t, tar.FormatPAX, regular(long+"p", 0o644, 0, 0, "p"), special("to-long-p", tar.TypeSymlink, long))},
		"names of no encoding":                            {ended(raw("\xff\xfe\x80-\x01", '0', []byte("x"), nil)), written(t, tar.FormatPAX, regular("ünïcödé \n\t", 0o644, 0, 0, "u"))},
		"sparse: the old form":                            {ended(oldSparse("sparse"), raw("after", '0', []byte("x"), nil))},
		"contiguous":                                      {ended(raw("contiguous", '7', []byte("abc"), nil), raw("old", 0, []byte("x"), nil), raw("dir/", 0, nil, nil))},
		"sparse: PAX":                                     {sparsePAX(t)},
		"a header for all":                                {written(t, tar.FormatPAX, item{tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "pax_global_header", PAXRecords: map[string]string{"comment": "c"}}, ""}, regular("x", 0o644, 0, 0, "x"))},
		"twice in one layer":                              {written(t, tar.FormatPAX, regular("x", 0o644, 0, 0, "first"), folder("y/", 0o700, 0, 0), regular("x", 0o600, 1, 1, "second"), folder("y/", 0o711, 2, 2))},
		"many bytes behind the end":                       {append(written(t, tar.FormatPAX, regular("x", 0o644, 0, 0, "x")), bytes.Repeat([]byte("junk"), 64<<10)...)},
		"no end":                                          {bytes.TrimRight(written(t, tar.FormatPAX, regular("x", 0o644, 0, 0, strings.Repeat("x", 512))), "\x00")},
		"times out of range":                              {written(t, tar.FormatPAX, item{tar.Header{Name: "ancient", Typeflag: tar.TypeReg, Mode: 0o644, ModTime: time.Unix(-1<<33, 0)}, "x"}, item{tar.Header{Name: "future", Typeflag: tar.TypeReg, Mode: 0o644, ModTime: time.Unix(1<<34, 0)}, "x"})},
		"empty layers alone":                              {empty, empty},
	}
}

// sparsePAX is GNU tar's form 1.0: a map, and the data that it places.
func sparsePAX(t *testing.T) []byte {
	text := "1\n4096\n3\n"
	data := text + strings.Repeat("\x00", 512-len(text)) + "abc"
	i := regular("GNUSparseFile.0/x", 0o644, 0, 0, data)
	i.PAXRecords = map[string]string{"XXX.sparse.major": "1", "XXX.sparse.minor": "0", "XXX.sparse.name": "holes", "XXX.sparse.realsize": "8192"}
	return bytes.ReplaceAll(written(t, tar.FormatPAX, i), []byte("XXX."), []byte("GNU."))
}

// treeOf describes all files below a root: what a process can see of them.
func treeOf(t *testing.T, root string) map[string]string {
	tree, inodes := map[string]string{}, map[uint64]string{}
	must(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		info, err := os.Lstat(path)
		must(t, err)
		st, name := info.Sys().(*syscall.Stat_t), strings.TrimPrefix(path, root)
		text := fmt.Sprintf("%o %d:%d", st.Mode, st.Uid, st.Gid)
		if !info.IsDir() {
			text += fmt.Sprintf(" %d.%09d", st.Mtim.Sec, st.Mtim.Nsec)
			if first := inodes[st.Ino]; first != "" {
				text += " as " + first
			} else if st.Nlink > 1 {
				inodes[st.Ino] = name
			}
		}
		switch st.Mode & syscall.S_IFMT {
		case syscall.S_IFREG:
			data, err := os.ReadFile(path)
			must(t, err)
			text += fmt.Sprintf(" %d %x", len(data), sha256.Sum256(data))
		case syscall.S_IFLNK:
			target, err := os.Readlink(path)
			must(t, err)
			text += " " + target
		case syscall.S_IFCHR, syscall.S_IFBLK:
			text += fmt.Sprintf(" %x", st.Rdev)
		}
		names := make([]byte, 4096)
		n, err := unix.Llistxattr(path, names)
		must(t, err)
		for _, key := range slices.Sorted(slices.Values(strings.Split(strings.TrimRight(string(names[:n]), "\x00"), "\x00"))) {
			if key == "" || strings.HasPrefix(key, "trusted.overlay.") {
				continue
			}
			value := make([]byte, 4096)
			n, err := unix.Lgetxattr(path, key, value)
			must(t, err)
			text += fmt.Sprintf(" %s=%q", key, value[:n])
		}
		tree[name] = text
		return nil
	}))
	return tree
}

// pushPacked pushes an image whose layers are stored as a packing says.
func (r *testRegistry) pushPacked(t *testing.T, path, config string, how packing, layers [][]byte) string {
	manifest := r.Image(ocispec.ImageConfig{})
	var diffs []digest.Digest
	for _, plain := range layers {
		layer := r.Blob(how.mediaType, how.pack(plain))
		layer.Annotations = how.annotations
		manifest.Layers, diffs = append(manifest.Layers, layer), append(diffs, digest.FromBytes(plain))
	}
	ids, err := json.Marshal(diffs)
	must(t, err)
	manifest.Config = r.Blob(ocispec.MediaTypeImageConfig, []byte(strings.ReplaceAll(config, "IDS", string(ids))))
	return r.name(path, manifest.MediaType, manifest)
}

const plainConfig = `{"os": "linux", "architecture": "ARCH", "rootfs": {"type": "layers", "diff_ids": IDS}}`

// TestCorpus unpacks images in the forms of builders and compares the files with what containerd's package makes of the
// same layers.
func TestCorpus(t *testing.T) {
	s, registry := openStoreAt(t, inMemory(t)), newTestRegistry(t)
	config := strings.ReplaceAll(plainConfig, "ARCH", nodePlatformArch())
	all, seen := corpus(t), map[string]bool{}
	for i, name := range slices.Sorted(maps.Keys(all)) {
		t.Run(name, func(t *testing.T) {
			layers, reference := all[name], t.TempDir()
			for _, layer := range layers {
				// The kinds that the package refuses are regular files.
				_, err := archive.Apply(t.Context(), reference, bytes.NewReader(layer), archive.WithFilter(func(h *tar.Header) (bool, error) {
					if h.Typeflag == 'S' || h.Typeflag == '7' {
						h.Typeflag = tar.TypeReg
					}
					return true, nil
				}))
				must(t, err)
			}
			want := treeOf(t, reference)
			how := packings[i%len(packings)]
			image := pull(t, s, registry.pushPacked(t, "corpus:1", config, how, layers))
			got := treeOf(t, mountImage(t, s, image))
			for _, path := range slices.Sorted(maps.Keys(want)) {
				harness.Want(t, got[path] == want[path], "%q is %q, want %q", path, got[path], want[path])
			}
			for path := range got {
				harness.Want(t, want[path] != "", "%q is there: %q", path, got[path])
			}
			seen[how.mediaType] = true
		})
	}
	for _, how := range packings {
		harness.Want(t, seen[how.mediaType], "no image has layers of type %s", how.mediaType)
	}
}

// TestPackings stores one layer in each way.
func TestPackings(t *testing.T) {
	registry := newTestRegistry(t)
	plain := written(t, tar.FormatPAX, regular("x", 0o644, 0, 0, strings.Repeat("x", 5000)))
	for i, how := range packings {
		s := openStoreAt(t, inMemory(t))
		config := strings.ReplaceAll(plainConfig, "ARCH", nodePlatformArch())
		image := pull(t, s, registry.pushPacked(t, fmt.Sprintf("packed:%d", i), config, how, [][]byte{plain}))
		checkFile(t, filepath.Join(mountImage(t, s, image), "x"), strings.Repeat("x", 5000))
	}
	junk := packing{ocispec.MediaTypeImageLayerGzip, func(plain []byte) []byte { return append(gzipWithZeros(plain), "junk"...) }, nil}
	reference := registry.pushPacked(t, "packed:junk", strings.ReplaceAll(plainConfig, "ARCH", nodePlatformArch()), junk, [][]byte{plain})
	_, err := openStore(t).Pull(t.Context(), reference, Auth{}, nil)
	harness.WantError(t, err, "gzip: invalid header")
}

// A whiteout hides what lower layers have, and nothing of its own layer, wherever it stands (image-spec, layer.md).
func TestWhiteoutsOfTheOwnLayer(t *testing.T) {
	s, registry := openStoreAt(t, inMemory(t)), newTestRegistry(t)
	config := strings.ReplaceAll(plainConfig, "ARCH", nodePlatformArch())
	base := written(t, tar.FormatPAX, regular("f", 0o644, 0, 0, "old"), folder("d/", 0o755, 0, 0), regular("d/old", 0o644, 0, 0, "old"), folder("d/sub/", 0o755, 0, 0), regular("d/sub/old", 0o644, 0, 0, "old"))
	for _, test := range []struct {
		name  string
		items []item
		want  string // the files, with what they hold
	}{
		{"a file", []item{regular("f", 0o644, 0, 0, "new"), regular(".wh.f", 0, 0, 0, "")}, "/d /d/old=old /d/sub /d/sub/old=old /f=new"},
		{"a file, before", []item{regular(".wh.f", 0, 0, 0, ""), regular("f", 0o644, 0, 0, "new")}, "/d /d/old=old /d/sub /d/sub/old=old /f=new"},
		{"a directory", []item{folder("d/", 0o700, 0, 0), regular("d/f", 0o644, 0, 0, "new"), regular(".wh.d", 0, 0, 0, "")}, "/d /d/f=new /f=old"},
		{"a directory without an entry", []item{regular("d/sub/f", 0o644, 0, 0, "new"), regular(".wh.d", 0, 0, 0, "")}, "/d /d/sub /d/sub/f=new /f=old"},
		{"opaque, without entries for what is between", []item{regular("d/sub/f", 0o644, 0, 0, "new"), regular("d/.wh..wh..opq", 0, 0, 0, "")}, "/d /d/sub /d/sub/f=new /f=old"},
		{"a directory that becomes a file", []item{regular("d", 0o644, 0, 0, "new"), regular(".wh.d", 0, 0, 0, "")}, "/d=new /f=old"},
		{"both, and the root", []item{regular("f", 0o644, 0, 0, "new"), regular(".wh.f", 0, 0, 0, ""), regular(".wh..wh..opq", 0, 0, 0, ""), regular(".wh..wh..opq", 0, 0, 0, "")}, "/f=new"},
		{"a link", []item{special("f", tar.TypeSymlink, "d"), regular(".wh.f", 0, 0, 0, "")}, "/d /d/old=old /d/sub /d/sub/old=old /f"},
	} {
		t.Run(test.name, func(t *testing.T) {
			image := pull(t, s, registry.pushPacked(t, "own:1", config, packings[1], [][]byte{base, written(t, tar.FormatPAX, test.items...)}))
			root := mountImage(t, s, image)
			var got []string
			for path := range treeOf(t, root) {
				if data, err := os.ReadFile(root + path); err == nil {
					path += "=" + string(data)
				}
				got = append(got, path)
			}
			slices.Sort(got)
			harness.Same(t, "files", strings.Join(got, " "), test.want)
		})
	}
}

// Configurations that lack fields, or have null for them.
func TestConfigurationsOfBuilders(t *testing.T) {
	s, registry := openStoreAt(t, inMemory(t)), newTestRegistry(t)
	layer := written(t, tar.FormatPAX, regular("x", 0o644, 0, 0, "x"))
	arch := nodePlatformArch()
	for _, config := range []string{
		`{"architecture": "` + arch + `", "os": "linux", "config": null, "history": null, "created": null, "rootfs": {"type": "layers", "diff_ids": IDS}}`,
		`{"rootfs": {"diff_ids": IDS}}`,
		`{"os": "linux", "rootfs": {"type": "layers", "diff_ids": IDS}, "config": {}}`,
		`{"architecture": "` + arch + `", "os": "linux", "config": {"Env": null, "Cmd": null, "Entrypoint": null, "Volumes": null, "Labels": null, "ExposedPorts": null, "User": "", "WorkingDir": null}, "rootfs": {"type": "layers", "diff_ids": IDS}}`,
		`{"architecture": "` + arch + `", "os": "linux", "variant": "v99", "os.version": "1", "os.features": ["x"], "created": "no time", "docker_version": 1, "history": [{"empty_layer": true}], "rootfs": {"type": "layers", "diff_ids": IDS}, "container_config": {"Cmd": "x"}}`,
	} {
		image := pull(t, s, registry.pushPacked(t, "config:1", config, packings[0], [][]byte{layer}))
		checkFile(t, filepath.Join(mountImage(t, s, image), "x"), "x")
		uid, _ := image.User()
		harness.Want(t, uid != nil && *uid == 0 && len(image.Spec.Config.Env) == 0, "%s: %+v", config, image.Spec.Config)
	}
}
