package config

import (
	"encoding/json"
	"errors"
	"flag"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// DefaultFile is read if it is there, when no other file is named.
const DefaultFile = "/etc/minicri/config.toml"

// Read reads the configuration for the given flags; its error is that of the flags. Help
// is written to the output. A command that has more flags than the daemon adds them with
// more, and may take words too, before, between or after its flags.
func Read(arguments []string, output io.Writer, more ...func(*flag.FlagSet)) (_ *Loaded, words []string, err error) {
	// Parsed twice: once to find the file, and again over its values.
	var file string
	if words, err = parse(Default(), &file, arguments, output, nil, more); err != nil {
		return nil, nil, err
	}
	l := &Loaded{Config: Default(), Sources: make(map[string]string)}
	l.readAll(file)
	if _, err := parse(l.Config, &file, arguments, io.Discard, l.Sources, more); err != nil {
		return nil, nil, err
	}
	l.finish()
	return l, words, nil
}

// finish is the end of every load: paths are resolved once, here, and then checked. A
// value that is refused is the default from here on.
func (l *Loaded) finish() {
	for _, path := range []*string{&l.Root, &l.State, &l.NetnsDir} {
		*path = resolved(*path)
	}
	for _, problem := range l.problems() {
		l.Broken = append(l.Broken, l.Locate(problem))
		l.reset(keyOf(problem))
	}
}

// resolved is a path without symlinks, as libcontainer and mountinfo have it; what is
// not there yet stays as it is. One that cannot be resolved is for its user to report.
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
	// The package would print the whole help below each error.
	usage := set.Usage
	if usage == nil {
		usage = set.PrintDefaults
	}
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

// Flags adds the daemon's flags to a set. Those of keys have the keys' names
// and comments.
func (c *Config) Flags(set *flag.FlagSet, file *string) {
	set.StringVar(file, "config", "", "configuration `file` in TOML, with its drop-ins FILE.d/*.toml (default "+DefaultFile+" if it exists)")
	for key, value := range c.flagKeys() {
		set.StringVar(value, strings.ReplaceAll(key, "_", "-"), *value, tagOf(key).Get("comment"))
	}
	set.Var(&directories{list: &c.Images.CertsDirs}, "certs-dir", "`directory` searched for HOST/hosts.toml of registries; may be repeated, and replaces images.certs_dirs")
}

// flagKeys are the keys that have a flag.
func (c *Config) flagKeys() map[string]*string {
	return map[string]*string{
		"socket": &c.Socket, "root": &c.Root, "state": &c.State, "netns_dir": &c.NetnsDir, "cni_conf_dir": &c.CNIConf,
		"cni_bin_dir": &c.CNIBin, "shim": &c.Shim, "log_level": &c.LogLevel,
	}
}

// tagOf has the tags of a key or a table that is in no other.
func tagOf(key string) reflect.StructTag {
	for _, field := range reflect.VisibleFields(reflect.TypeFor[Config]()) {
		if field.Tag.Get("toml") == key {
			return field.Tag
		}
	}
	return ""
}

// IsReloaded reports whether a change of the key, "limits.run" say, takes effect
// without a restart of the daemon: the tag is on its table.
func IsReloaded(key string) bool {
	first, _, _ := strings.Cut(key, ".")
	return tagOf(first).Get("reload") != ""
}

// Reloaded is the configuration with those keys of a fresh one that are reloaded.
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

// File is the configuration file that Load reads for the given flags.
func File(arguments []string) string {
	var file string
	if _, err := parse(Default(), &file, arguments, io.Discard, nil, nil); err != nil || file == "" {
		return DefaultFile
	}
	return file
}

// Write writes the configuration as a file that ReadFile reads, with a comment
// on every key.
func (c *Config) Write(w io.Writer) error {
	return toml.NewEncoder(w).SetIndentTables(false).Encode(c)
}

// Level is the log level.
func (c *Config) Level() (slog.Level, error) {
	var level slog.Level
	err := level.UnmarshalText([]byte(c.LogLevel))
	return level, err
}

// directories is a flag that may be repeated; the first one replaces the
// configured list.
type directories struct {
	list  *[]string
	given bool
}

func (d *directories) String() string {
	if d.list == nil {
		return ""
	}
	return strings.Join(*d.list, ":")
}

func (d *directories) Set(directory string) error {
	if !d.given {
		*d.list, d.given = nil, true
	}
	*d.list = append(*d.list, directory)
	return nil
}

// MarshalJSON has the keys and the forms of the file.
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
