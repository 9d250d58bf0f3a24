package config

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

// DefaultFile is read, if it exists, when no other file is named.
const DefaultFile = "/etc/minicri/config.toml"

// Loaded is a configuration with its problems. The daemon refuses one with Broken parts; commands use it.
type Loaded struct {
	*Config
	Sources map[string]string // by key, where a value that is no default is from: "FILE:LINE", or the flag
	Unknown []error           // keys without effect, which another build may know
	Broken  []error           // files that are ignored, and values whose defaults are used instead
}

// Strict returns an error for everything unknown or broken.
func (l *Loaded) Strict() error { return errors.Join(slices.Concat(l.Unknown, l.Broken)...) }

// Locate prefixes an error that begins with a key by the key's source.
func (l *Loaded) Locate(err error) error {
	if source := l.Sources[keyOf(err)]; source != "" {
		return fmt.Errorf("%s: %w", source, err)
	}
	return err
}

func keyOf(err error) string {
	key, _, _ := strings.Cut(err.Error(), ": ")
	key, _, _ = strings.Cut(key, ",")
	return key
}

// reset gives a key its default. For a key of a handler it resets all handlers.
func (l *Loaded) reset(key string) {
	to, from := reflect.ValueOf(l.Config).Elem(), reflect.ValueOf(Default()).Elem()
	for name := range strings.SplitSeq(key, ".") {
		i := slices.IndexFunc(reflect.VisibleFields(to.Type()), func(f reflect.StructField) bool { return f.Tag.Get("toml") == name })
		if i < 0 {
			return
		}
		if to, from = to.Field(i), from.Field(i); to.Kind() != reflect.Struct {
			to.Set(from)
			return
		}
	}
}

// Read reads the configuration; its error is that of the flags. more adds a command's flags.
func Read(arguments []string, output io.Writer, more ...func(*flag.FlagSet)) (_ *Loaded, words []string, err error) {
	// Parse twice: to find the file, and again over its values.
	var file string
	if words, err = parse(Default(), &file, arguments, output, nil, more); err != nil {
		return nil, nil, err
	}
	l := &Loaded{Config: Default(), Sources: make(map[string]string)}
	name := cmp.Or(file, DefaultFile)
	for _, path := range append([]string{name}, DropIns(name)...) {
		info, err := os.Stat(path)
		switch {
		case err == nil && path != file && !info.Mode().IsRegular(): // a fifo would hold up the daemon; a person may name one
			err = fmt.Errorf("%s is no regular file", path)
		case err == nil:
			err = l.readFile(path)
		}
		if err != nil && (file != "" || path != name || !errors.Is(err, fs.ErrNotExist)) {
			l.Broken = append(l.Broken, err)
		}
	}
	if _, err := parse(l.Config, &file, arguments, io.Discard, l.Sources, more); err != nil {
		return nil, nil, err
	}
	// Resolve paths before they are checked. A default replaces what is refused.
	// netns_dir keeps its symlinks: agents of networks open CNI_NETNS below a prefix, and have /var/run/netns there.
	for _, path := range []*string{&l.Root, &l.State} {
		*path = resolved(*path)
	}
	for _, problem := range l.problems() {
		l.Broken = append(l.Broken, l.Locate(problem))
		l.reset(keyOf(problem))
	}
	return l, words, nil
}

// resolved returns a path without symlinks, as libcontainer and mountinfo need it, as far as it exists.
func resolved(path string) string {
	if !filepath.IsAbs(path) {
		return path
	}
	rest := ""
	for above := filepath.Clean(path); ; above = filepath.Dir(above) {
		real, err := filepath.EvalSymlinks(above)
		if err == nil {
			return filepath.Join(real, rest)
		}
		if !errors.Is(err, fs.ErrNotExist) || above == "/" {
			return path
		}
		if _, err := os.Lstat(above); err == nil {
			return path // a link that leads nowhere
		}
		rest = filepath.Join(filepath.Base(above), rest)
	}
}

// parse notes in sources which keys have a flag.
func parse(c *Config, file *string, arguments []string, output io.Writer, sources map[string]string, more []func(*flag.FlagSet)) (words []string, err error) {
	set := flag.NewFlagSet("minicri", flag.ContinueOnError)
	set.SetOutput(output)
	c.Flags(set, file)
	for _, add := range more {
		add(set)
	}
	// The package flag would print all help below each error.
	usage := set.Usage
	set.Usage = func() {}
	set.SetOutput(io.Discard)
	for {
		if err := set.Parse(arguments); err != nil {
			if errors.Is(err, flag.ErrHelp) {
				set.SetOutput(output)
				usage()
			}
			return nil, err
		}
		if set.NArg() == 0 {
			set.Visit(func(f *flag.Flag) {
				key := strings.ReplaceAll(f.Name, "-", "_")
				if key == "certs_dir" {
					key = "images.certs_dirs"
				}
				if sources != nil {
					sources[key] = "--" + f.Name
				}
			})
			return words, nil
		}
		words, arguments = append(words, set.Arg(0)), set.Args()[1:]
	}
}

// Flags adds the daemon's flags to a set, with the names and comments of their keys.
func (c *Config) Flags(set *flag.FlagSet, file *string) {
	set.StringVar(file, "config", "", "configuration `file` in TOML, with its drop-ins FILE.d/*.toml (default "+DefaultFile+" if it exists)")
	for key, value := range c.flagKeys() {
		set.StringVar(value, strings.ReplaceAll(key, "_", "-"), *value, tagOf(key).Get("comment"))
	}
	given := false // the first one replaces the configured list
	set.Func("certs-dir", "`directory` searched for HOST/hosts.toml of registries; may be repeated, and replaces images.certs_dirs", func(directory string) error {
		if !given {
			c.Images.CertsDirs, given = nil, true
		}
		c.Images.CertsDirs = append(c.Images.CertsDirs, directory)
		return nil
	})
}

func (c *Config) flagKeys() map[string]*string {
	return map[string]*string{
		"socket": &c.Socket, "root": &c.Root, "state": &c.State, "netns_dir": &c.NetnsDir, "cni_conf_dir": &c.CNIConf,
		"cni_bin_dir": &c.CNIBin, "shim": &c.Shim, "log_level": &c.LogLevel,
	}
}

// tagOf returns the tags of a key or table on the top level.
func tagOf(key string) reflect.StructTag {
	for _, field := range reflect.VisibleFields(reflect.TypeFor[Config]()) {
		if field.Tag.Get("toml") == key {
			return field.Tag
		}
	}
	return ""
}

// IsReloaded reports whether a key ("limits.run") takes effect without a restart, by its table's tag.
func IsReloaded(key string) bool {
	first, _, _ := strings.Cut(key, ".")
	return tagOf(first).Get("reload") != ""
}

// Reloaded returns the configuration with the reloaded keys of a fresh one.
func (c *Config) Reloaded(fresh *Config) *Config {
	next := *c
	from, to := reflect.ValueOf(fresh).Elem(), reflect.ValueOf(&next).Elem()
	for i := range to.NumField() {
		if to.Type().Field(i).Tag.Get("reload") != "" {
			to.Field(i).Set(from.Field(i))
		}
	}
	return &next
}

// File returns the configuration file for the flags.
func File(arguments []string) string {
	var file string
	if _, err := parse(Default(), &file, arguments, io.Discard, nil, nil); err != nil || file == "" {
		return DefaultFile
	}
	return file
}

// Write writes the configuration as a file with a comment on every key.
func (c *Config) Write(w io.Writer) error {
	return toml.NewEncoder(w).SetIndentTables(false).Encode(c)
}

// Level parses the log level.
func (c *Config) Level() (slog.Level, error) {
	var level slog.Level
	err := level.UnmarshalText([]byte(c.LogLevel))
	return level, err
}

// MarshalJSON writes the keys and forms of the file.
func (c *Config) MarshalJSON() ([]byte, error) {
	text, err := toml.Marshal(c)
	if err != nil {
		return nil, err
	}
	var tables map[string]any
	if err := toml.Unmarshal(text, &tables); err != nil {
		return nil, err
	}
	return json.Marshal(tables)
}

// DropIns returns the drop-ins of a file, by name.
func DropIns(file string) []string {
	paths, _ := filepath.Glob(filepath.Join(file+".d", "*.toml")) // the pattern is fine
	slices.Sort(paths)
	return paths
}

// readFile reads a file over what is there. With a value of a wrong kind nothing of the file counts.
func (l *Loaded) readFile(file string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	err = decode(data, Default())
	var unknown *toml.StrictMissingError
	var wrong *toml.DecodeError
	switch {
	case errors.As(err, &unknown):
		for _, one := range unknown.Errors {
			line, _ := one.Position()
			l.Unknown = append(l.Unknown, fmt.Errorf("%s:%d: unknown key %q: 'minicri config default' lists all keys", file, line, strings.Join(one.Key(), ".")))
		}
	case errors.As(err, &wrong):
		line, column := wrong.Position()
		return fmt.Errorf("%s:%d:%d: %w", file, line, column, err)
	case err != nil:
		return fmt.Errorf("%s: %w", file, err)
	}
	for key, line := range linesOf(data) {
		l.Sources[key] = fmt.Sprintf("%s:%d", file, line)
	}
	_ = decode(data, l.Config) // as above
	return nil
}

func decode(data []byte, c *Config) error {
	return toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields().Decode(c)
}

func linesOf(data []byte) map[string]int {
	lines, table := make(map[string]int), ""
	parser := &unstable.Parser{}
	parser.Reset(data)
	for parser.NextExpression() {
		switch expression := parser.Expression(); expression.Kind {
		case unstable.Table, unstable.ArrayTable:
			table, _ = keyOfNode(parser, expression)
			table += "."
		case unstable.KeyValue:
			addLines(lines, parser, table, expression)
		}
	}
	return lines
}

// addLines adds a key, or all keys of an inline table.
func addLines(lines map[string]int, parser *unstable.Parser, table string, node *unstable.Node) {
	key, line := keyOfNode(parser, node)
	if node.Value().Kind != unstable.InlineTable {
		lines[table+key] = line
		return
	}
	for children := node.Value().Children(); children.Next(); {
		addLines(lines, parser, table+key+".", children.Node())
	}
}

func keyOfNode(parser *unstable.Parser, node *unstable.Node) (key string, line int) {
	var parts []string
	for part := node.Key(); part.Next(); {
		parts = append(parts, string(part.Node().Data))
		if line == 0 {
			line = parser.Shape(part.Node().Raw).Start.Line
		}
	}
	return strings.Join(parts, "."), line
}
