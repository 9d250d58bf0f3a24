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
	"google.golang.org/grpc/test/bufconn"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/internal/redact"
)

type imageOptions struct {
	Socket          string       // where a daemon answers (inspect.DebugSocket)
	Store           image.Config // its images, used when no daemon serves
	Input           io.Reader    // the archive "-"
	Output          io.Writer
	Creds, Platform string // of a pull
	JSON            bool   // the form of a list
	Force           bool   // whether a file may be overwritten
}

// runImage gets the verb and its arguments as words.
func runImage(ctx context.Context, words []string, o imageOptions) (err error) {
	if len(words) == 0 {
		return misused("image: a verb is missing: `minicri help image` lists them")
	}
	verb, arguments := words[0], words[1:]
	takes, known := map[string]int{"import": 1, "save": 2, "pull": 1, "ls": 0, "inspect": 1, "rm": 1, "untag": 1, "tag": 2}[verb]
	switch {
	case !known:
		return misused("image: unknown verb %q: `minicri help image` lists them", verb)
	case len(arguments) != takes:
		return misused("image %s: wrong number of arguments: `minicri help image %s`", verb, verb)
	}
	images, done, err := openImages(ctx, verb, o)
	if errors.Is(err, fs.ErrNotExist) && verb == "ls" {
		return printImages(nil, o)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, done()) }()
	name := ""
	if takes > 0 {
		name = url.QueryEscape(arguments[0])
	}
	switch verb {
	case "import":
		return importArchive(ctx, images, arguments[0], o)
	case "pull":
		return pullImage(ctx, images, arguments[0], o)
	case "save":
		save := func(archive io.Writer) error { return images.Save(ctx, "/images/save?name="+name, archive) }
		if arguments[1] == "-" {
			return save(o.Output)
		}
		return writeFile(arguments[1], o.Force, save)
	case "rm":
		return images.Do(ctx, http.MethodDelete, "/images?name="+name)
	case "untag":
		return images.Do(ctx, http.MethodDelete, "/images/name?name="+name)
	case "tag":
		return images.Do(ctx, http.MethodPost, "/images/tag?name="+name+"&as="+url.QueryEscape(arguments[1]))
	case "inspect":
		var described image.Description
		if err := images.JSON(ctx, "/images/inspect?name="+name, &described); err != nil {
			return err
		}
		return writeJSON(o.Output, described)
	default:
		var all []inspect.Image
		if err := images.JSON(ctx, "/images", &all); err != nil {
			return err
		}
		return printImages(all, o)
	}
}

// openImages prefers the daemon, which owns the store. If none serves, this process answers itself.
func openImages(ctx context.Context, verb string, options imageOptions) (images inspect.Client, done func() error, err error) {
	serves, err := daemonServes(ctx, options.Socket)
	switch {
	case err != nil:
		return images, nil, err
	case serves:
		return inspect.NewClient(options.Socket), func() error { return nil }, nil
	}
	// Commands that only look do not make a store.
	if _, err := os.Stat(filepath.Join(options.Store.Root, "image")); err != nil && verb != "pull" && verb != "import" {
		return images, nil, fmt.Errorf("no daemon serves, and there are no images of one: %w", err)
	}
	looks, open := verb == "ls" || verb == "inspect", image.Open
	if looks {
		open = image.OpenToLook
	}
	store, err := open(ctx, options.Store)
	if err != nil {
		return images, nil, fmt.Errorf("no daemon serves at %s, and: %w", options.Socket, err)
	}
	mux := http.NewServeMux()
	inspect.ImageRoutes(mux, store, slog.New(slog.DiscardHandler), nil)
	listener, server := bufconn.Listen(1<<20), &http.Server{Handler: mux}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	return inspect.NewClientBy("in this process", listener.DialContext), func() error {
		err := inspect.Stop(server, endLimit) // before the store is closed
		<-served
		if looks || verb == "save" {
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

func printImages(all []inspect.Image, call imageOptions) error {
	if call.JSON {
		return writeJSON(call.Output, append([]inspect.Image{}, all...))
	}
	table := tabwriter.NewWriter(call.Output, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "IMAGE\tDIGEST\tID\tSIZE")
	for _, one := range all {
		for _, name := range shownNames(one) {
			digest := ""
			for _, known := range one.Digests { // another repository may not have it
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

func imageCommand(ctx context.Context, arguments []string, output io.Writer) error {
	l, err := look(ctx, "image", arguments)
	if err != nil {
		return err
	}
	logger, _ := newLogger(l.Config)
	return runImage(ctx, l.words, imageOptions{
		Socket: inspect.DebugSocket(l.State), Store: imageConfig(l.Config, logger), Input: os.Stdin, Output: output,
		Creds: l.text("creds"), Platform: l.text("platform"), JSON: l.has("json"), Force: l.has("force"),
	})
}

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

func importArchive(ctx context.Context, images inspect.Client, path string, call imageOptions) error {
	archive := call.Input
	if path != "-" {
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		defer file.Close()
		archive = file
	}
	answer, err := images.Call(ctx, http.MethodPost, "/images/import", archive)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	var imported []inspect.Image
	if err := json.NewDecoder(answer.Body).Decode(&imported); err != nil {
		return err
	}
	for _, one := range imported {
		fmt.Fprintln(call.Output, redact.Line(shownNames(one)[0]), one.ID)
	}
	return nil
}

func pullImage(ctx context.Context, images inspect.Client, name string, call imageOptions) error {
	var auth image.Auth
	auth.Username, auth.Password, _ = strings.Cut(call.Creds, ":")
	document, err := json.Marshal(auth)
	if err != nil {
		return err
	}
	lines := newPullProgress(call.Output)
	path := "/images/pull?" + url.Values{"name": {name}, "platform": {call.Platform}}.Encode()
	pulled, err := images.Pull(ctx, path, bytes.NewReader(document), lines.show)
	lines.end()
	if err != nil {
		return err
	}
	fmt.Fprintln(call.Output, pulled.ID)
	return nil
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
