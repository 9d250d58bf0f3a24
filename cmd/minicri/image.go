package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/test/bufconn"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/internal/redact"
)

// withImages runs an operation on the images of the node. look is true for operations that change nothing.
func withImages(cmd *cobra.Command, mode storeMode, do func(ctx context.Context, c call, images inspect.Client) error) (err error) {
	c, err := look(cmd)
	if err != nil {
		return err
	}
	logger, _ := newLogger(c.Config)
	images, done, err := openImages(cmd.Context(), mode, inspect.DebugSocket(c.State), imageConfig(c.Config, logger))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, done()) }()
	return do(cmd.Context(), c, images)
}

// storeMode is the need of an operation when no daemon serves the store.
type storeMode int

const (
	looking  storeMode = iota // changes nothing
	reading                   // changes nothing, and takes long
	changing                  // changes images that exist
	making                    // makes a store if there is none
)

func importCommand(cmd *cobra.Command, arguments []string) error {
	archive := cmd.InOrStdin()
	if arguments[0] != "-" {
		file, err := os.Open(arguments[0])
		if err != nil {
			return fmt.Errorf("import images: %w", err)
		}
		defer file.Close()
		archive = file
	}
	return withImages(cmd, making, func(ctx context.Context, _ call, images inspect.Client) error {
		imported, err := images.Import(ctx, archive)
		if err != nil {
			return fmt.Errorf("import %s: %w", arguments[0], err)
		}
		for _, one := range imported {
			fmt.Fprintln(cmd.OutOrStdout(), redact.Line(shownNames(one)[0]), one.ID)
		}
		return nil
	})
}

func saveCommand(cmd *cobra.Command, arguments []string) error {
	return withImages(cmd, reading, func(ctx context.Context, c call, images inspect.Client) error {
		save := func(archive io.Writer) error { return images.Save(ctx, pathOf("/images/save", arguments[0]), archive) }
		if arguments[1] == "-" {
			return save(cmd.OutOrStdout())
		}
		return writeFile(arguments[1], c.has("force"), save)
	})
}

func imageRemoveCommand(cmd *cobra.Command, arguments []string) error {
	return changeImage(cmd, http.MethodDelete, pathOf("/images", arguments[0]))
}

func untagCommand(cmd *cobra.Command, arguments []string) error {
	return changeImage(cmd, http.MethodDelete, pathOf("/images/name", arguments[0]))
}

func tagCommand(cmd *cobra.Command, arguments []string) error {
	return changeImage(cmd, http.MethodPost, pathOf("/images/tag", arguments[0])+"&as="+url.QueryEscape(arguments[1]))
}

func changeImage(cmd *cobra.Command, method, path string) error {
	return withImages(cmd, changing, func(ctx context.Context, _ call, images inspect.Client) error {
		return images.Do(ctx, method, path)
	})
}

func imageInspectCommand(cmd *cobra.Command, arguments []string) error {
	return withImages(cmd, looking, func(ctx context.Context, _ call, images inspect.Client) error {
		var described image.Description
		if err := images.JSON(ctx, pathOf("/images/inspect", arguments[0]), &described); err != nil {
			return err
		}
		return writeJSON(cmd.OutOrStdout(), described)
	})
}

func imageListCommand(cmd *cobra.Command, _ []string) error {
	all := []inspect.Image{} // not null for none
	listed := call{flags: cmd.Flags()}
	err := withImages(cmd, looking, func(ctx context.Context, _ call, images inspect.Client) error {
		return images.JSON(ctx, "/images", &all)
	})
	if err != nil && !errors.Is(err, errNoStore) {
		return err
	}
	return listed.show(cmd, all, func(output io.Writer) error { return printImages(all, output) })
}

func pathOf(route, name string) string { return route + "?name=" + url.QueryEscape(name) }

var errNoStore = errors.New("no daemon serves, and there are no images of one")

// openImages prefers the daemon, which owns the store. If none serves, this process answers itself.
func openImages(ctx context.Context, mode storeMode, socket string, config image.Config) (images inspect.Client, done func() error, err error) {
	serves, err := daemonServes(ctx, socket)
	switch {
	case err != nil:
		return images, nil, err
	case serves:
		return inspect.NewClient(socket), func() error { return nil }, nil
	}
	if _, err := os.Stat(filepath.Join(config.Root, "image")); err != nil && mode != making {
		return images, nil, fmt.Errorf("%w: %w", errNoStore, err)
	}
	open := image.Open
	if mode == looking {
		open = image.OpenToLook
	}
	store, err := open(ctx, config)
	if err != nil {
		return images, nil, fmt.Errorf("no daemon serves at %s, and: %w", socket, err)
	}
	mux := http.NewServeMux()
	inspect.ImageRoutes(mux, store, slog.New(slog.DiscardHandler), nil)
	listener, server := bufconn.Listen(1<<20), &http.Server{Handler: mux}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	return inspect.NewClientBy("in this process", listener.DialContext), func() error {
		err := inspect.Stop(server, endLimit) // before the store is closed
		<-served
		if mode == looking || mode == reading {
			return errors.Join(err, store.Close())
		}
		return errors.Join(err, store.Collect(context.WithoutCancel(ctx)), store.Close())
	}, nil
}

// writeFile makes a whole file or none. With force it replaces one that is there, once the new one is whole.
func writeFile(path string, force bool, write func(io.Writer) error) error {
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target // the link stays
	}
	if before, err := os.Stat(path); err == nil && (!force || !before.Mode().IsRegular()) {
		return fmt.Errorf("%s is there already: name another file, or give --force to replace a file", path)
	}
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	if err = errors.Join(write(file), file.Close()); err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return nil
}

// daemonServes fails if the caller may not ask.
func daemonServes(ctx context.Context, socket string) (bool, error) {
	dialer := net.Dialer{Timeout: dialLimit}
	connection, err := dialer.DialContext(ctx, "unix", socket)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return false, fmt.Errorf("a daemon that may serve cannot be asked: run this as root: %w", err)
	case err != nil:
		return false, nil
	}
	return true, connection.Close()
}

func printImages(all []inspect.Image, output io.Writer) error {
	table := tabwriter.NewWriter(output, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "IMAGE\tDIGEST\tID\tSIZE")
	for _, one := range all {
		for _, name := range shownNames(one) {
			digest := one.Target // an imported image is in no repository
			for _, known := range one.Digests {
				if repository, its, _ := strings.Cut(known, "@"); name == known || strings.HasPrefix(name, repository+":") {
					digest = its
				}
			}
			fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", redact.Line(name), shortID(digest), shortID(one.ID), humanSize(one.Size))
		}
	}
	return table.Flush()
}

func shownNames(i inspect.Image) []string {
	switch {
	case len(i.Tags) > 0:
		return i.Tags
	case len(i.Digests) > 0:
		return i.Digests
	default:
		return []string{"<none>"}
	}
}

func shortID(id string) string {
	id = strings.TrimPrefix(id, "sha256:")
	return id[:min(12, len(id))]
}

func humanSize(bytes int64) string { return units.BytesSize(float64(bytes)) }

// stateOf returns the state directory. If only --socket is given, it asks the daemon that serves there.
func stateOf(ctx context.Context, l *config.Loaded) (string, error) {
	if l.Sources["socket"] != "--socket" || l.Sources["state"] == "--state" {
		return l.State, nil
	}
	running, err := runningConfig(ctx, l.Socket)
	if err != nil {
		return "", fmt.Errorf("ask the daemon at %s for its directory: %w", l.Socket, err)
	}
	if running == nil {
		return "", fmt.Errorf("no daemon serves %s, so its directory is not known: give --state", l.Socket)
	}
	state, _ := running["state"].(string)
	return cmp.Or(state, l.State), nil
}

func pullCommand(cmd *cobra.Command, arguments []string) error {
	return withImages(cmd, making, func(ctx context.Context, c call, images inspect.Client) error {
		var auth image.Auth
		auth.Username, auth.Password, _ = strings.Cut(c.text("creds"), ":")
		document, err := json.Marshal(auth)
		if err != nil {
			return err
		}
		lines := newPullProgress(cmd.OutOrStdout())
		path := pathOf("/images/pull", arguments[0]) + "&platform=" + url.QueryEscape(c.text("platform"))
		pulled, err := images.Pull(ctx, path, bytes.NewReader(document), lines.show)
		lines.end()
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), pulled.ID)
		return err
	})
}

// pullProgress redraws one line on a terminal, and elsewhere writes a line for each finished blob.
type pullProgress struct {
	output   io.Writer
	terminal bool
	latest   map[string]image.Progress // by digest
	began    time.Time
}

func newPullProgress(output io.Writer) *pullProgress {
	return &pullProgress{output: output, terminal: styleOf(output).Width > 0, latest: map[string]image.Progress{}, began: time.Now()}
}

// show must not be called concurrently.
func (l *pullProgress) show(p image.Progress) {
	before := l.latest[p.Digest]
	l.latest[p.Digest] = p
	switch {
	case l.terminal:
		l.redraw()
	case p.Stage == image.StageDone && before.Stage != image.StageDone:
		fmt.Fprintf(l.output, "%s  %-12s %s of %s\n", redact.Line(shortID(p.Digest)), p.Stage, humanSize(p.Done), humanSize(p.Total))
	}
}

// redraw draws the bar of the download, which is complete for a blob in any later stage.
func (l *pullProgress) redraw() {
	const width = 20
	var done, total int64
	ready := 0
	for _, p := range l.latest {
		if p.Stage == image.StageDone {
			ready++
		}
		if p.Stage != image.StageDownload {
			p.Done = p.Total
		}
		done, total = done+min(p.Done, p.Total), total+p.Total // a registry may send more than it said
	}
	full := int(width * done / max(total, 1))
	speed := float64(done) / max(time.Since(l.began).Seconds(), 1)
	fmt.Fprintf(l.output, "\r\x1b[2K[%s%s] %s of %s, %s/s, %d of %d blobs done", strings.Repeat("#", full), strings.Repeat(" ", width-full),
		humanSize(done), humanSize(total), humanSize(int64(speed)), ready, len(l.latest))
}

func (l *pullProgress) end() {
	if l.terminal && len(l.latest) > 0 {
		fmt.Fprintln(l.output)
	}
}
