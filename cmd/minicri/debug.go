package main

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/supervisor/client"
)

func bundleCommand(cmd *cobra.Command, arguments []string) error {
	if os.Geteuid() != 0 {
		return errors.New("write the bundle: its data belongs to root: run it as root")
	}
	c, err := look(cmd)
	if err != nil {
		return err
	}
	file := arguments[0]
	err = writeFile(file, c.has("force"), func(file io.Writer) error {
		packed := gzip.NewWriter(file)
		b := &bundle{tar: tar.NewWriter(packed)}
		collect(cmd.Context(), c.Loaded, b)
		return errors.Join(b.err, b.tar.Close(), packed.Close())
	})
	if err != nil {
		return fmt.Errorf("write the bundle: %w", err)
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: look at it before you send it. Environments, secrets and credentials are left out; names of "+
		"pods, images and addresses are in it.\n", file)
	return err
}

// collect adds every part. Where one cannot be collected it adds the error.
func collect(ctx context.Context, l *config.Loaded, b *bundle) {
	c := l.Config
	b.add("version.txt", func() (any, error) { return "minicri " + version + "\n", nil })
	b.add("config.json", func() (any, error) { return c, nil })
	b.add("config-sources.txt", func() (any, error) {
		var sources strings.Builder
		for _, v := range l.Values() { // their values are in config.json
			fmt.Fprintln(&sources, v.Name, v.Source)
		}
		return sources.String(), nil
	})
	daemon := inspect.NewClient(inspect.DebugSocket(c.State))
	limited, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	b.add("timelines.json", func() (any, error) { return findTimelines(limited, c, "") })
	for name, path := range map[string]string{"goroutines.txt": "/goroutines", "heap.pprof": "/debug/pprof/heap", "metrics.txt": "/metrics"} {
		b.add(name, func() (any, error) { return daemon.Read(limited, path) })
	}
	b.add("pods.json", func() (any, error) {
		data, err := daemon.Read(limited, "/pods")
		return json.RawMessage(data), err
	})
	logs, _ := filepath.Glob(filepath.Join(c.State, "shims", "*", client.Log)) // the pattern is fine
	for _, path := range logs {
		b.add("supervisors/"+filepath.Base(filepath.Dir(path))+".log", func() (any, error) { return client.TailOfLog(path) })
	}
	b.add("check.json", func() (any, error) { return examine(ctx, l) })
	b.networks("networks", c.CNIConf)
	for _, path := range c.CNIConfDirs() {
		b.networks("networks-of-handlers"+path, path)
	}
	b.machine(ctx)
}

// bundle is a tar.gz. Every part goes through package redact, but profiles, which have no data of pods.
type bundle struct {
	tar *tar.Writer
	err error // what could not be written
}

// add adds a string or bytes as text, and any other value as JSON. Profiles stay as they are.
func (b *bundle) add(name string, get func() (any, error)) {
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

func (b *bundle) networks(folder, directory string) {
	entries, err := os.ReadDir(directory)
	if err != nil {
		b.add(folder, func() (any, error) { return nil, err })
	}
	for _, entry := range entries {
		if info, err := os.Stat(filepath.Join(directory, entry.Name())); err == nil && info.Mode().IsRegular() {
			b.add(folder+"/"+entry.Name()+".json", func() (any, error) {
				data, err := os.ReadFile(filepath.Join(directory, entry.Name()))
				return redact.JSON(data), err
			})
		}
	}
}

func (b *bundle) machine(ctx context.Context) {
	for _, path := range []string{"/proc/version", "/proc/meminfo", "/proc/loadavg", "/proc/pressure/io", "/proc/pressure/cpu", "/proc/pressure/memory", "/proc/self/mountinfo", "/proc/cgroups", "/etc/os-release"} {
		b.add("machine"+strings.ReplaceAll(path, "/", "-")+".txt", func() (any, error) { return os.ReadFile(path) })
	}
	for name, command := range map[string]string{
		"journal": "journalctl -u minicri -n 5000 --no-pager", "links": "ip -d address", "routes": "ip route show table all", "rules": "nft list ruleset", "kernel": "dmesg",
	} {
		b.add("machine-"+name+".txt", func() (any, error) {
			ctx, cancel := context.WithTimeout(ctx, runLimit)
			defer cancel()
			words := strings.Fields(command)
			return exec.CommandContext(ctx, words[0], words[1:]...).Output()
		})
	}
}
