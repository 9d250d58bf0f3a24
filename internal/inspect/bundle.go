package inspect

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/minicri/minicri/internal/redact"
)

// Bundle is an archive (tar.gz) of what a maintainer asks for. Every part goes
// through package redact, profiles excepted, which have no data of pods. A part
// that cannot be collected is a file with the error.
type Bundle struct {
	packed *gzip.Writer
	tar    *tar.Writer
	errs   []error
}

// NewBundle begins an archive; Close ends it.
func NewBundle(w io.Writer) *Bundle {
	packed := gzip.NewWriter(w)
	return &Bundle{packed: packed, tar: tar.NewWriter(packed)}
}

// Close ends the archive, and returns what could not be written.
func (b *Bundle) Close() error {
	return errors.Join(append(b.errs, b.tar.Close(), b.packed.Close())...)
}

func (b *Bundle) add(name string, data []byte) {
	header := &tar.Header{Name: "minicri-debug/" + name, Mode: 0o600, Size: int64(len(data)), ModTime: time.Now()}
	if err := b.tar.WriteHeader(header); err != nil {
		b.errs = append(b.errs, err)
		return
	}
	_, err := b.tar.Write(data)
	b.errs = append(b.errs, err)
}

// JSON adds a value as a document.
func (b *Bundle) JSON(name string, get func() (any, error)) {
	b.File(name, func() ([]byte, error) {
		value, err := get()
		if err != nil {
			return nil, err
		}
		data, err := json.Marshal(value)
		if err != nil {
			return nil, err
		}
		return json.MarshalIndent(redact.JSON(data), "", "  ")
	})
}

// Text adds a text.
func (b *Bundle) Text(name string, get func() (string, error)) {
	b.File(name, func() ([]byte, error) {
		text, err := get()
		return []byte(text), err
	})
}

// File adds a file; only profiles stay as they are.
func (b *Bundle) File(name string, get func() ([]byte, error)) {
	data, err := get()
	switch {
	case err != nil:
		b.add(name+".missing", []byte(redact.Text(err.Error())+"\n"))
	case strings.HasSuffix(name, ".pprof"):
		b.add(name, data)
	case strings.HasSuffix(name, ".json"):
		b.add(name, data)
	default:
		b.add(name, []byte(redact.Text(string(data))))
	}
}

// Networks adds the files of a directory of network configurations to a folder of
// the archive.
func (b *Bundle) Networks(folder, directory string) {
	entries, err := os.ReadDir(directory)
	if err != nil {
		b.add(folder+".missing", []byte(err.Error()+"\n"))
		return
	}
	for _, entry := range entries {
		if !entry.Type().IsRegular() {
			continue
		}
		b.File(folder+"/"+entry.Name()+".json", func() ([]byte, error) {
			data, err := os.ReadFile(filepath.Join(directory, entry.Name()))
			return redact.JSON(data), err
		})
	}
}

// commandLimit is how long a program that describes the machine may take.
const commandLimit = 10 * time.Second

// Machine adds what the machine is and what the daemon has last logged.
func (b *Bundle) Machine(ctx context.Context) {
	for _, path := range []string{"/proc/version", "/proc/meminfo", "/proc/loadavg", "/proc/pressure/io", "/proc/pressure/cpu", "/proc/pressure/memory", "/proc/self/mountinfo", "/proc/cgroups", "/etc/os-release"} {
		b.File("machine"+strings.ReplaceAll(path, "/", "-")+".txt", func() ([]byte, error) { return os.ReadFile(path) })
	}
	for name, command := range map[string][]string{
		"journal": {"journalctl", "-u", "minicri", "-n", "5000", "--no-pager"}, "links": {"ip", "-d", "address"}, "routes": {"ip", "route", "show", "table", "all"}, "kernel": {"dmesg"},
	} {
		b.File("machine-"+name+".txt", func() ([]byte, error) {
			ctx, cancel := context.WithTimeout(ctx, commandLimit)
			defer cancel()
			return exec.CommandContext(ctx, command[0], command[1:]...).Output()
		})
	}
}
