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
	err    error
}

// NewBundle begins an archive; Close ends it.
func NewBundle(w io.Writer) *Bundle {
	packed := gzip.NewWriter(w)
	return &Bundle{packed: packed, tar: tar.NewWriter(packed)}
}

// Close ends the archive, and returns what could not be written.
func (b *Bundle) Close() error { return errors.Join(b.err, b.tar.Close(), b.packed.Close()) }

// Add adds a file: a string or bytes as a text, and any other value as JSON. Profiles
// stay as they are.
func (b *Bundle) Add(name string, get func() (any, error)) {
	value, err := get()
	var data []byte
	switch v := value.(type) {
	case string:
		data = []byte(redact.Text(v))
	case []byte:
		if data = v; !strings.HasSuffix(name, ".pprof") {
			data = []byte(redact.Text(string(v)))
		}
	default:
		if data, _ = json.Marshal(v); err == nil { // which then fails, too
			data, err = json.MarshalIndent(redact.JSON(data), "", "  ")
		}
	}
	if err != nil {
		name, data = name+".missing", []byte(redact.Text(err.Error())+"\n")
	}
	header := &tar.Header{Name: "minicri-debug/" + name, Mode: 0o600, Size: int64(len(data)), ModTime: time.Now()}
	err = b.tar.WriteHeader(header)
	if err == nil {
		_, err = b.tar.Write(data)
	}
	b.err = errors.Join(b.err, err)
}

// Networks adds the files of a directory of network configurations to a folder of
// the archive.
func (b *Bundle) Networks(folder, directory string) {
	entries, err := os.ReadDir(directory)
	if err != nil {
		b.Add(folder, func() (any, error) { return nil, err })
	}
	for _, entry := range entries {
		if entry.Type().IsRegular() {
			b.Add(folder+"/"+entry.Name()+".json", func() (any, error) {
				data, err := os.ReadFile(filepath.Join(directory, entry.Name()))
				return redact.JSON(data), err
			})
		}
	}
}

// commandLimit is how long a program that describes the machine may take.
const commandLimit = 10 * time.Second

// Machine adds what the machine is and what the daemon has last logged.
func (b *Bundle) Machine(ctx context.Context) {
	for _, path := range []string{"/proc/version", "/proc/meminfo", "/proc/loadavg", "/proc/pressure/io", "/proc/pressure/cpu", "/proc/pressure/memory", "/proc/self/mountinfo", "/proc/cgroups", "/etc/os-release"} {
		b.Add("machine"+strings.ReplaceAll(path, "/", "-")+".txt", func() (any, error) { return os.ReadFile(path) })
	}
	for name, command := range map[string]string{
		"journal": "journalctl -u minicri -n 5000 --no-pager", "links": "ip -d address", "routes": "ip route show table all", "kernel": "dmesg",
	} {
		b.Add("machine-"+name+".txt", func() (any, error) {
			ctx, cancel := context.WithTimeout(ctx, commandLimit)
			defer cancel()
			words := strings.Fields(command)
			return exec.CommandContext(ctx, words[0], words[1:]...).Output()
		})
	}
}
