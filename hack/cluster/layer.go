package main

import (
	"archive/tar"
	"errors"
	"os"
	"path"
	"strings"
)

// layerWriter writes a tar archive. It keeps its first error; close returns it.
type layerWriter struct {
	*tar.Writer
	written map[string]bool // directories
	err     error
}

// skeleton writes what every program takes for granted of its root.
func (w *layerWriter) skeleton() {
	for _, directory := range []string{"etc", "root", "run", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "usr/local/bin", "var"} {
		w.directory(directory, 0o755)
	}
	w.directory("tmp", 0o1777)
	for _, name := range []string{"bin", "sbin", "lib", "lib64"} {
		w.link("/"+name, "usr/"+name)
	}
	w.data("etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"))
	w.data("etc/group", 0o644, []byte("root:x:0:\nnogroup:x:65534:\n"))
}

func (w *layerWriter) directory(name string, mode int64) {
	if w.written[name] || name == "." || name == "" {
		return
	}
	w.directory(path.Dir(name), 0o755)
	w.written[name] = true
	w.header(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode})
}

// file writes a file of this machine. The directories of Debian that are links
// into /usr are links in the image as well.
func (w *layerWriter) file(from, to string, mode int64) {
	data, err := os.ReadFile(from)
	if err != nil {
		w.err = errors.Join(w.err, err)
		return
	}
	name := strings.TrimPrefix(to, "/")
	switch top, _, _ := strings.Cut(name, "/"); top {
	case "bin", "sbin", "lib", "lib64":
		name = "usr/" + name
	}
	w.directory(path.Dir(name), 0o755)
	w.data(name, mode, data)
	w.written[name] = true
}

func (w *layerWriter) data(name string, mode int64, data []byte) {
	w.header(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(data))})
	if w.err == nil {
		_, w.err = w.Write(data)
	}
}

func (w *layerWriter) link(name, to string) {
	name = strings.TrimPrefix(name, "/")
	if strings.HasPrefix(name, "bin/") {
		name = "usr/" + name
	}
	if w.written[name] {
		return
	}
	w.written[name] = true
	w.header(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to, Mode: 0o777})
}

func (w *layerWriter) header(h *tar.Header) {
	if w.err == nil {
		w.err = w.WriteHeader(h)
	}
}

func (w *layerWriter) close() error { return errors.Join(w.err, w.Close()) }
