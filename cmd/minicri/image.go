package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/docker/go-units"
	"golang.org/x/term"
	"google.golang.org/grpc/test/bufconn"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/internal/redact"
)

// imageOptions is what runImage needs to know of the daemon.
type imageOptions struct {
	Socket string       // where a daemon answers (inspect.DebugSocket)
	Store  image.Config // its images, used when no daemon serves
	Input  io.Reader    // the archive "-"
	Output io.Writer

	Creds, Platform string // of a pull
	JSON            bool   // the form of a list
	Force           bool   // whether a file may be overwritten
}

// runImage is `minicri image`: words are the verb and its arguments.
func runImage(ctx context.Context, words []string, options imageOptions) error {
	verb, arguments, err := imageVerb(words)
	if err != nil {
		return err
	}
	images, done, err := openImages(ctx, words[0], options)
	if errors.Is(err, fs.ErrNotExist) && words[0] == "ls" {
		return printImages(nil, options)
	}
	if err != nil {
		return err
	}
	return errors.Join(verb(ctx, images, arguments, options), done())
}

type imageVerbFunc func(ctx context.Context, images inspect.Client, arguments []string, call imageOptions) error

// imageVerb finds the verb and checks that it has the arguments it needs.
func imageVerb(args []string) (imageVerbFunc, []string, error) {
	if len(args) == 0 {
		return nil, nil, misused("image: a verb is missing: `minicri help image` lists them")
	}
	verbs := map[string]struct {
		run       imageVerbFunc
		arguments int
	}{
		"import": {importArchive, 1}, "save": {saveArchive, 2}, "pull": {pullImage, 1}, "ls": {listImages, 0}, "inspect": {inspectImage, 1},
		"rm": {changeImage(http.MethodDelete, "/images?name="), 1}, "untag": {changeImage(http.MethodDelete, "/images/name?name="), 1},
		"tag": {changeImage(http.MethodPost, "/images/tag?name=", "&as="), 2},
	}
	verb, ok := verbs[args[0]]
	if !ok {
		return nil, nil, misused("image: unknown verb %q: `minicri help image` lists them", args[0])
	}
	if len(args)-1 != verb.arguments {
		return nil, nil, misused("image %s: wrong number of arguments: `minicri help image %s`", args[0], args[0])
	}
	return verb.run, args[1:], nil
}

// lastChange is how long a pull or an import that was interrupted may take to end: the
// store is not closed beside it.
const lastChange = time.Minute

// openImages prefers the daemon: the store belongs to it while it runs. Without one
// this process answers itself.
func openImages(ctx context.Context, verb string, options imageOptions) (images inspect.Client, done func() error, err error) {
	serves, err := daemonServes(ctx, options.Socket)
	switch {
	case err != nil:
		return images, nil, err
	case serves:
		return inspect.NewClient(options.Socket), func() error { return nil }, nil
	}
	if err := needsStore(verb, options.Store.Root); err != nil {
		return images, nil, err
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
	inspect.ImageRoutes(mux, store, slog.New(slog.DiscardHandler), nil) // it says itself how a pull ends
	listener, server := bufconn.Listen(1<<20), &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	return inspect.NewClientBy("in this process", listener.DialContext), func() error {
		err := inspect.Stop(server, lastChange)
		<-served // it always has an error, that it was closed
		if looks || verb == "save" {
			return errors.Join(err, store.Close())
		}
		// There is no background once the process ends.
		return errors.Join(err, store.Collect(context.WithoutCancel(ctx)), store.Close())
	}, nil
}

// needsStore is an error where nothing but a pull or an import has something to do: a
// command that looks makes no store.
func needsStore(verb, root string) error {
	if verb == "pull" || verb == "import" {
		return nil
	}
	dir := filepath.Join(root, "image")
	if _, err := os.Stat(dir); err != nil {
		return fmt.Errorf("no daemon serves, and there are no images of one: %w", err)
	}
	return nil
}

// changeImage makes a call whose answer has nothing; each part of the path is followed
// by an argument.
func changeImage(method string, parts ...string) imageVerbFunc {
	return func(ctx context.Context, images inspect.Client, arguments []string, _ imageOptions) error {
		path := ""
		for i, part := range parts {
			path += part + url.QueryEscape(arguments[i])
		}
		return images.Do(ctx, method, path)
	}
}

// writeFile makes a file of what write writes, or none. With force it replaces one that
// is there, which stays until the new one is whole; what is no file, as a device, is
// written to.
func writeFile(path string, force bool, write func(io.Writer) error) error {
	open := func() (*os.File, error) { return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) }
	if force {
		if before, err := os.Stat(path); err == nil && !before.Mode().IsRegular() {
			file, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			return errors.Join(write(file), file.Close())
		}
		if target, err := filepath.EvalSymlinks(path); err == nil {
			path = target // the link stays
		}
		open = func() (*os.File, error) { return os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") }
	}
	file, err := open()
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s is there already: name another file, or give --force", path)
	}
	if err != nil {
		return err
	}
	err = errors.Join(write(file), file.Close())
	if err == nil && force {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return nil
}

// daemonServes fails where who asks may not know.
func daemonServes(ctx context.Context, socket string) (bool, error) {
	dialer := net.Dialer{Timeout: time.Second}
	connection, err := dialer.DialContext(ctx, "unix", socket)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return false, fmt.Errorf("a daemon that may serve cannot be asked: run this as root: %w", err)
	case err != nil:
		return false, nil
	}
	return true, connection.Close()
}

func listImages(ctx context.Context, images inspect.Client, _ []string, call imageOptions) error {
	var all []inspect.Image
	if err := images.JSON(ctx, "/images", &all); err != nil {
		return err
	}
	return printImages(all, call)
}

func printImages(all []inspect.Image, call imageOptions) error {
	if call.JSON {
		return writeJSON(call.Output, append([]inspect.Image{}, all...))
	}
	table := tabwriter.NewWriter(call.Output, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "IMAGE\tDIGEST\tID\tSIZE")
	for _, one := range all {
		for _, name := range shownNames(one) {
			fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", redact.Line(name), shortID(digestOfImage(one)), shortID(one.ID), humanSize(one.Size))
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

// digestOfImage is that of the manifest, by which a registry has the image; "" if it comes from
// none.
func digestOfImage(i inspect.Image) string {
	for _, name := range i.Digests {
		if _, digest, found := strings.Cut(name, "@"); found {
			return digest
		}
	}
	return ""
}

func shortID(id string) string {
	id = strings.TrimPrefix(id, "sha256:")
	return id[:min(12, len(id))]
}

func humanSize(bytes int64) string { return units.BytesSize(float64(bytes)) }

// imageCommand runs `minicri image` with the configuration of the daemon.
func imageCommand(ctx context.Context, arguments []string, output io.Writer) error {
	options := imageOptions{Input: os.Stdin, Output: output}
	l, words, err := look(arguments, func(set *flag.FlagSet) {
		set.StringVar(&options.Creds, "creds", "", "")
		set.StringVar(&options.Platform, "platform", "", "")
		set.BoolVar(&options.JSON, "json", false, "")
		set.BoolVar(&options.Force, "force", false, "")
	})
	if err != nil {
		return err
	}
	logger, _, err := newLogger(l.Config)
	if err != nil {
		return err
	}
	state, err := stateOf(ctx, l)
	if err != nil {
		return err
	}
	options.Socket, options.Store = inspect.DebugSocket(state), imageConfig(l.Config, logger)
	return runImage(ctx, words, options)
}

// stateOf returns the directory of the daemon whose images are meant. Who names its CRI
// socket alone means the one that serves there, which knows where its directory is.
func stateOf(ctx context.Context, l *config.Loaded) (string, error) {
	if l.Sources["socket"] != "--socket" || l.Sources["state"] == "--state" {
		return l.State, nil
	}
	running, err := runningConfig(ctx, l.Socket)
	if err != nil {
		return "", fmt.Errorf("ask the daemon at %s for its directory: %w", l.Socket, err)
	}
	if state, says := running["state"].(string); says {
		return state, nil
	}
	return l.State, nil
}

func importArchive(ctx context.Context, images inspect.Client, arguments []string, call imageOptions) error {
	archive := call.Input
	if path := arguments[0]; path != "-" {
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

func saveArchive(ctx context.Context, images inspect.Client, arguments []string, call imageOptions) error {
	source, path := "/images/save?name="+url.QueryEscape(arguments[0]), arguments[1]
	save := func(archive io.Writer) error { return images.Save(ctx, source, archive) }
	if path == "-" {
		return save(call.Output)
	}
	return writeFile(path, call.Force, save)
}

func pullImage(ctx context.Context, images inspect.Client, arguments []string, call imageOptions) error {
	var auth image.Auth
	auth.Username, auth.Password, _ = strings.Cut(call.Creds, ":")
	document, err := json.Marshal(auth)
	if err != nil {
		return err
	}
	lines := newLayerLines(call.Output)
	path := "/images/pull?" + url.Values{"name": arguments, "platform": {call.Platform}}.Encode()
	pulled, err := images.Pull(ctx, path, bytes.NewReader(document), lines.show)
	lines.end()
	if err != nil {
		return err
	}
	fmt.Fprintln(call.Output, pulled.ID)
	return nil
}

func inspectImage(ctx context.Context, images inspect.Client, arguments []string, call imageOptions) error {
	var described image.Description
	if err := images.JSON(ctx, "/images/inspect?name="+url.QueryEscape(arguments[0]), &described); err != nil {
		return err
	}
	return writeJSON(call.Output, described)
}

// layerLines shows a pull: on a terminal one line for each blob, rewritten as it
// proceeds; elsewhere a line when a blob is done.
type layerLines struct {
	output   io.Writer
	terminal bool
	order    []string
	latest   map[string]image.Progress
	shown    int        // lines on the terminal
	height   func() int // of the terminal, 0 for no limit
	began    time.Time
	fetched  int64 // bytes
}

func newLayerLines(output io.Writer) *layerLines {
	height := func() int { return styleOf(output).Height }
	return &layerLines{output: output, terminal: isTerminal(output), height: height, latest: map[string]image.Progress{}, began: time.Now()}
}

func isTerminal(output io.Writer) bool {
	file, ok := output.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}

// show shows the progress of one layer. Calls do not overlap.
func (l *layerLines) show(p image.Progress) {
	before, known := l.latest[p.Digest]
	if !known {
		l.order = append(l.order, p.Digest)
	}
	l.latest[p.Digest] = p
	if p.Stage == image.StageDownload {
		l.fetched += p.Done - before.Done
	}
	switch {
	case l.terminal:
		l.redraw()
	case p.Stage == image.StageDone && before.Stage != image.StageDone:
		fmt.Fprintln(l.output, line(p))
	}
}

func (l *layerLines) redraw() {
	if l.shown > 0 {
		fmt.Fprintf(l.output, "\x1b[%dA", l.shown)
	}
	var done, total int64
	for _, digest := range l.order {
		p := l.latest[digest]
		if total += p.Total; p.Stage == image.StageDownload {
			done += p.Done
		} else {
			done += p.Total
		}
	}
	rows := l.rows()
	for _, p := range rows {
		fmt.Fprintf(l.output, "\x1b[2K%s  %s\n", bar(p), line(p))
	}
	speed := float64(l.fetched) / max(time.Since(l.began).Seconds(), 1)
	fmt.Fprintf(l.output, "\x1b[2K%s of %s, %s/s\n\x1b[J", humanSize(done), humanSize(total), humanSize(int64(speed)))
	l.shown = len(rows) + 1
}

// rows are the blobs for which the screen has lines, those first that are not done: the
// cursor goes up no further than to its first line.
func (l *layerLines) rows() (rows []image.Progress) {
	for _, digest := range l.order {
		rows = append(rows, l.latest[digest])
	}
	if height := l.height(); height > 0 && len(rows) > height-2 {
		slices.SortStableFunc(rows, func(a, b image.Progress) int {
			switch done := a.Stage == image.StageDone; {
			case done == (b.Stage == image.StageDone):
				return 0
			case done:
				return 1
			}
			return -1
		})
		rows = rows[:max(0, height-2)]
	}
	return rows
}

// end shows what is left of blobs that need no unpacking.
func (l *layerLines) end() {
	if !l.terminal {
		return
	}
	for digest, p := range l.latest {
		if p.Done == p.Total {
			p.Stage = image.StageDone
			l.latest[digest] = p
		}
	}
	l.redraw()
}

// bar is as full as the stage of a blob.
func bar(p image.Progress) string {
	const width = 20
	full := int(min(width, width*p.Done/max(p.Total, 1))) // a registry may send more than it said
	return "[" + strings.Repeat("#", full) + strings.Repeat(" ", width-full) + "]"
}

func line(p image.Progress) string {
	return fmt.Sprintf("%s  %-12s %s of %s", redact.Line(shortID(p.Digest)), p.Stage, humanSize(p.Done), humanSize(p.Total))
}
