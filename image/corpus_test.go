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

func regular(name, data string) item {
	return item{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, ModTime: time.Unix(1, 0)}, data}
}

// items reads entries, one a line: a kind, a name, mode and owner, and the data of a file or the target of a link.
//
//	d NAME MODE UID:GID          f NAME MODE UID:GID DATA
//	l NAME TARGET                h NAME TARGET, a hard link
//	c NAME, b NAME, p NAME       devices and a pipe
//	w NAME                       a whiteout
func items(t *testing.T, text string) (all []item) {
	kinds := map[string]byte{
		"d": tar.TypeDir, "f": tar.TypeReg, "l": tar.TypeSymlink, "h": tar.TypeLink,
		"c": tar.TypeChar, "b": tar.TypeBlock, "p": tar.TypeFifo, "w": tar.TypeReg,
	}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		i := regular(fields[1], "")
		i.Typeflag = kinds[fields[0]]
		switch fields[0] {
		case "d", "f":
			_, err := fmt.Sscanf(fields[2]+" "+fields[3], "%o %d:%d", &i.Mode, &i.Uid, &i.Gid)
			must(t, err)
			i.data = strings.Join(fields[4:], " ")
		case "l", "h":
			i.Linkname, i.Mode = fields[2], 0o777
		default:
			i.Devmajor, i.Devminor = 1, 3
		}
		all = append(all, i)
	}
	return all
}

func pax(t *testing.T, text string) []byte { return written(t, tar.FormatPAX, items(t, text)...) }
func gnu(t *testing.T, text string) []byte { return written(t, tar.FormatGNU, items(t, text)...) }

// attributed gives the first of some entries records of pax(1).
func attributed(t *testing.T, text string, records map[string]string) []byte {
	all := items(t, text)
	all[0].PAXRecords = records
	return written(t, tar.FormatPAX, all...)
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
	for at, text := range map[int]string{
		0: name, 100: "0000644\x00", 108: "0000000\x00", 116: "0000000\x00", 124: fmt.Sprintf("%011o\x00", len(data)),
		136: "00000000001\x00", 148: "        ", 156: string(kind), 257: "ustar  \x00",
	} {
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
	return raw(
		name,
		'S',
		[]byte("abc"),
		map[int]string{386: octal(4096), 398: octal(3), 410: octal(8192), 422: octal(0), 483: octal(8192)},
	)
}

func ended(parts ...[]byte) []byte { return append(bytes.Join(parts, nil), make([]byte, 1024)...) }

// packing is how a layer is stored.
type packing struct {
	mediaType   string
	pack        func(plain []byte) []byte
	annotations map[string]string
}

func gzipMembers(plain []byte) []byte { // estargz packs each part by itself, and adds a footer
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

func zstdChunks(plain []byte) []byte { // zstd:chunked has frames, and a skippable one with a table
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
	{ocispec.MediaTypeImageLayerGzip, gzipMembers, map[string]string{
		"containerd.io/snapshot/stargz/toc.digest": "sha256:0", "io.containers.estargz.uncompressed-size": "1",
	}},
	{ocispec.MediaTypeImageLayer, asItIs, nil},
	{ocispec.MediaTypeImageLayer, gzipMembers, nil}, // buildah, for years
	{ocispec.MediaTypeImageLayer, zstdChunks, nil},
	{ocispec.MediaTypeImageLayerZstd, zstdChunks, map[string]string{
		"io.github.containers.zstd-chunked.manifest-checksum": "sha256:0",
		"io.github.containers.zstd-chunked.manifest-position": "1:2:3:1",
	}},
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

// capability is cap_net_bind_service=ep.
const capability = "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// corpus is what builders make of a root file system: layers as plain tars, bottom first.
func corpus(t *testing.T) map[string][][]byte {
	long := strings.Repeat("long/", 60) + strings.Repeat("n", 200)
	base := pax(t, `
		d etc/ 755 0:0
		f etc/passwd 644 0:0 root:x:0:0::/:
		d d/ 750 5:6
		f d/old 600 5:6 old
		d d/sub/ 711 7:8
		f d/sub/old 644 7:8 old
		f f 644 0:0 old
		l link d
		d empty/ 700 0:0`)
	empty := make([]byte, 1024)
	capable := map[string]string{"SCHILY.xattr.security.capability": capability, "SCHILY.xattr.user.a": "b\x00c"}
	times := regular("t", "x")
	times.ModTime, times.AccessTime, times.ChangeTime = time.Unix(
		1700000000,
		123456789,
	), time.Unix(
		1600000000,
		0,
	), time.Unix(
		1,
		0,
	)
	ancient, future := regular("ancient", "x"), regular("future", "x")
	ancient.ModTime, future.ModTime = time.Unix(-1<<33, 0), time.Unix(1<<34, 0)
	global := item{tar.Header{
		Typeflag: tar.TypeXGlobalHeader, Name: "pax_global_header", PAXRecords: map[string]string{"comment": "c"},
	}, ""}
	return map[string][][]byte{
		"kaniko": {
			base,
			gnu(t, "f /f 755 0:0 new\n d / 755 0:0\n w etc/.wh.passwd\n d d/ 700 1:1\n f f 700 2:2 newer"),
		},
		"buildkit: times, empty layers": {base, empty, written(t, tar.FormatPAX, times), empty},
		"ko: no directories": {
			written(t, tar.FormatUSTAR, regular("ko-app/deep/app", "elf"), regular("var/run/ko/LICENSE", "l")),
		},
		"jib: a directory each time": {
			base, gnu(t, "d app/ 755 0:0\n d app/libs/ 755 0:0\n f app/libs/a.jar 644 0:0 a"),
			gnu(t, "d app/ 755 9:9\n d app/classes/ 755 0:0\n f app/classes/A.class 644 0:0 b"),
		},
		"bazel: ./ and absolute names": {gnu(t, `
			d ./ 700 3:3
			d ./opt/ 755 0:0
			f ./opt/a 644 0:0 a
			f /opt/b 644 0:0 b
			f opt//c 644 0:0 c
			f opt/./x/../d 644 0:0 d`)},
		"nix: read-only directories, links": {gnu(t, `
			d nix/store/ 1775 0:30000
			d nix/store/a/ 555 0:0
			f nix/store/a/f 444 0:0 f
			h nix/store/a/g nix/store/a/f
			l bin /nix/store/a
			l dangling ../../../none
			l nix/store/a/loop loop`)},
		"podman: attributes of a file": {attributed(t, "f ping 755 0:0 p", capable)},
		"podman: attributes of a directory, devices": {attributed(t, `
			d dir/ 2755 1:2
			c null
			b block
			p fifo
			f suid 6755 1000:1000 s
			f none 0 0:0 n`, map[string]string{"SCHILY.xattr.user.d": "e"})},
		"podman: capabilities that are replaced": {
			attributed(t, "f ping 755 0:0 p", capable),
			pax(t, "f ping 755 0:0 q"),
		},
		"podman: capabilities below another name": {
			attributed(t, "f ping 755 0:0 p", capable),
			pax(t, "h pong ping\n f x 644 0:0 x"),
		},
		"buildpacks: the same layer twice": {
			base, pax(t, "d layers/ 755 1000:1001\n f layers/x 644 1000:1001 x"), base,
			pax(t, "d layers/ 755 1000:1001\n f layers/x 644 1000:1001 x"),
		},
		"umoci: whiteouts before": {
			base,
			pax(t, "w .wh.f\n w d/.wh.sub\n d d/sub/ 700 0:0\n f d/sub/new 644 0:0 new\n w .wh.none"),
		},
		"whiteouts: opaque first": {
			base,
			pax(t, "d d/ 755 0:0\n w d/.wh..wh..opq\n f d/new 644 0:0 new"),
		},
		"whiteouts: opaque last": {
			base,
			pax(t, "d d/ 755 0:0\n f d/new 644 0:0 new\n d d/n/ 755 0:0\n f d/n/new 644 0:0 n\n w d/.wh..wh..opq"),
		},
		"whiteouts: of all, of a link, of AUFS": {
			base,
			pax(t, "w .wh.link\n w .wh..wh.aufs\n d .wh..wh.orph/ 700 0:0"),
			pax(t, "w .wh..wh..opq\n f last 644 0:0"),
		},
		"whiteouts: through a link": {base, pax(t, "w link/.wh.old")},
		"a file over a directory and back": {
			base,
			pax(t, "f d 644 0:0 file\n d f/ 755 0:0\n f f/x 644 0:0 x"),
			pax(t, "d d/ 755 0:0\n l f d"),
		},
		"through a link to a directory": {base, pax(t, "f link/through 644 0:0 x")},
		"apko: large owners": {
			gnu(t, "f big 644 4000000:3000000 x\n d home/ 755 65532:65532\n l home/h /big"),
		},
		"hard links": {
			base, pax(t, "f a 644 0:0 a\n h b a\n h c ./b\n h e /etc/passwd"), pax(t, "f a 600 0:0 A\n h d/h f"),
		},
		"long names": {
			gnu(t, "f "+long+" 644 0:0 g\n l to-long "+long),
			pax(t, "f "+long+"p 644 0:0 p\n l to-long-p "+long),
		},
		"names of no encoding": {
			ended(raw("\xff\xfe\x80-\x01", '0', []byte("x"), nil)),
			written(t, tar.FormatPAX, regular("ünïcödé \n\t", "u")),
		},
		"sparse: the old form": {ended(oldSparse("sparse"), raw("after", '0', []byte("x"), nil))},
		"sparse: PAX":          {sparsePAX(t)},
		"contiguous, and old": {
			ended(
				raw("contiguous", '7', []byte("abc"), nil),
				raw("old", 0, []byte("x"), nil),
				raw("dir/", 0, nil, nil),
			),
		},
		"a header for all":   {written(t, tar.FormatPAX, global, regular("x", "x"))},
		"twice in one layer": {pax(t, "f x 644 0:0 first\n d y/ 700 0:0\n f x 600 1:1 second\n d y/ 711 2:2")},
		"many bytes behind":  {append(pax(t, "f x 644 0:0 x"), bytes.Repeat([]byte("junk"), 64<<10)...)},
		"no end":             {pax(t, "f x 644 0:0 x")[:1024]},
		"times out of range": {written(t, tar.FormatPAX, ancient, future)},
		"empty layers alone": {empty, empty},
	}
}

// sparsePAX is GNU tar's form 1.0: a map, and the data that it places.
func sparsePAX(t *testing.T) []byte {
	text := "1\n4096\n3\n"
	data := text + strings.Repeat("\x00", 512-len(text)) + "abc"
	i := regular("GNUSparseFile.0/x", data)
	i.PAXRecords = map[string]string{
		"XXX.sparse.major":    "1",
		"XXX.sparse.minor":    "0",
		"XXX.sparse.name":     "holes",
		"XXX.sparse.realsize": "8192",
	}
	return bytes.ReplaceAll(written(t, tar.FormatPAX, i), []byte("XXX."), []byte("GNU."))
}

// treeOf describes all files below a root as a process can see them.
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
		keys := strings.Split(strings.TrimRight(string(names[:n]), "\x00"), "\x00")
		slices.Sort(keys)
		for _, key := range keys {
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

// pushPacked pushes an image whose layers are stored in a packing.
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
	manifest.Config = r.Blob(
		ocispec.MediaTypeImageConfig,
		[]byte(strings.NewReplacer("IDS", string(ids), "ARCH", nodePlatformArch()).Replace(config)),
	)
	return r.name(path, manifest.MediaType, manifest)
}

const plainConfig = `{"os": "linux", "architecture": "ARCH", "rootfs": {"type": "layers", "diff_ids": IDS}}`

// TestCorpus unpacks images in the forms of builders. containerd's package unpacks the same layers to the same files.
func TestCorpus(t *testing.T) {
	s, registry := openStoreAt(t, inMemory(t)), newTestRegistry(t)
	all, seen := corpus(t), map[string]bool{}
	for i, name := range slices.Sorted(maps.Keys(all)) {
		t.Run(name, func(t *testing.T) {
			layers, reference := all[name], t.TempDir()
			for _, layer := range layers {
				// The kinds that the package refuses are regular files.
				_, err := archive.Apply(
					t.Context(),
					reference,
					bytes.NewReader(layer),
					archive.WithFilter(func(h *tar.Header) (bool, error) {
						if h.Typeflag == 'S' || h.Typeflag == '7' {
							h.Typeflag = tar.TypeReg
						}
						return true, nil
					}),
				)
				must(t, err)
			}
			want := treeOf(t, reference)
			how := packings[i%len(packings)]
			image := pull(t, s, registry.pushPacked(t, "corpus:1", plainConfig, how, layers))
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
	plain := pax(t, "f x 644 0:0 "+strings.Repeat("x", 5000))
	for i, how := range packings {
		s := openStoreAt(t, inMemory(t))
		image := pull(t, s, registry.pushPacked(t, fmt.Sprintf("packed:%d", i), plainConfig, how, [][]byte{plain}))
		checkFile(t, filepath.Join(mountImage(t, s, image), "x"), strings.Repeat("x", 5000))
	}
	junk := packing{
		ocispec.MediaTypeImageLayerGzip,
		func(plain []byte) []byte { return append(gzipWithZeros(plain), "junk"...) },
		nil,
	}
	reference := registry.pushPacked(t, "packed:junk", plainConfig, junk, [][]byte{plain})
	_, err := openStore(t).Pull(t.Context(), reference, Auth{}, nil)
	harness.WantError(t, err, "gzip: invalid header")
}

// A whiteout hides what lower layers have, and nothing of its own layer, wherever it stands (image-spec, layer.md).
func TestWhiteoutsOfTheOwnLayer(t *testing.T) {
	s, registry := openStoreAt(t, inMemory(t)), newTestRegistry(t)
	base := pax(t, "f f 644 0:0 old\n d d/ 755 0:0\n f d/old 644 0:0 old\n d d/sub/ 755 0:0\n f d/sub/old 644 0:0 old")
	for _, test := range []struct {
		name, layer string
		want        string // the files with their data
	}{
		{"a file", "f f 644 0:0 new\n w .wh.f", "/d /d/old=old /d/sub /d/sub/old=old /f=new"},
		{"a file, before", "w .wh.f\n f f 644 0:0 new", "/d /d/old=old /d/sub /d/sub/old=old /f=new"},
		{"a directory", "d d/ 700 0:0\n f d/f 644 0:0 new\n w .wh.d", "/d /d/f=new /f=old"},
		{"a directory without an entry", "f d/sub/f 644 0:0 new\n w .wh.d", "/d /d/sub /d/sub/f=new /f=old"},
		{"opaque, no entry", "f d/sub/f 644 0:0 new\n w d/.wh..wh..opq", "/d /d/sub /d/sub/f=new /f=old"},
		{"a directory that becomes a file", "f d 644 0:0 new\n w .wh.d", "/d=new /f=old"},
		{"both, and the root", "f f 644 0:0 new\n w .wh.f\n w .wh..wh..opq\n w .wh..wh..opq", "/f=new"},
		{"a link", "l f d\n w .wh.f", "/d /d/old=old /d/sub /d/sub/old=old /f"},
		{
			"below a link", "l l d\n f l/f 644 0:0 new\n w l/.wh.f\n w l/.wh.old",
			"/d /d/f=new /d/sub /d/sub/old=old /f=old /l",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			layers := [][]byte{base, pax(t, test.layer)}
			root := mountImage(t, s, pull(t, s, registry.pushPacked(t, "own:1", plainConfig, packings[1], layers)))
			var got []string
			for path := range treeOf(t, root) {
				if data, err := os.ReadFile(root + path); err == nil && path != "/f" ||
					err == nil && test.name != "a link" {
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
	layer := pax(t, "f x 644 0:0 x")
	const rest = `"rootfs": {"type": "layers", "diff_ids": IDS}}`
	for _, config := range []string{
		`{"architecture": "ARCH", "os": "linux", "config": null, "history": null, "created": null, ` + rest,
		`{"rootfs": {"diff_ids": IDS}}`,
		`{"os": "linux", "config": {}, ` + rest,
		`{"architecture": "ARCH", "os": "linux", "config": {"Env": null, "Cmd": null, ` +
			`"Entrypoint": null, "Volumes": null, ` +
			`"Labels": null, "ExposedPorts": null, "User": "", "WorkingDir": null}, ` + rest,
		`{"architecture": "ARCH", "os": "linux", "variant": "v99", "os.version": "1", ` +
			`"os.features": ["x"], "created": "no time", ` +
			`"docker_version": 1, "history": [{"empty_layer": true}], "container_config": {"Cmd": "x"}, ` + rest,
	} {
		image := pull(t, s, registry.pushPacked(t, "config:1", config, packings[0], [][]byte{layer}))
		checkFile(t, filepath.Join(mountImage(t, s, image), "x"), "x")
		uid, _ := image.User()
		harness.Need(t, uid != nil, "%s: %+v", config, image.Spec.Config)
		harness.Want(t, *uid == 0, "%s: %+v", config, image.Spec.Config)
		harness.Want(t, len(image.Spec.Config.Env) == 0, "%s: %+v", config, image.Spec.Config)
	}
}
