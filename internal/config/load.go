package config

import (
	"bytes"
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
)

// DefaultFile is read if it is there, when no other file is named.
const DefaultFile = "/etc/minicri/config.toml"

// Load reads the configuration for the given flags. A file that is named has
// to exist. Help and errors of flags are written to the output. A command that
// has more flags than the daemon adds them with more.
func Load(arguments []string, output io.Writer, more ...func(*flag.FlagSet)) (*Config, error) {
	c, words, err := LoadWith(arguments, output, more...)
	if err == nil && len(words) > 0 {
		err = fmt.Errorf("%q is neither a command nor a flag of minicri: see minicri --help", words[0])
	}
	return c, err
}

// LoadWith is Load for a command that takes words too, before, between or after
// its flags; it returns them.
func LoadWith(arguments []string, output io.Writer, more ...func(*flag.FlagSet)) (_ *Config, words []string, err error) {
	// Parsed twice: once to find the file, and again over its values.
	var file string
	if words, err = parse(Default(), &file, arguments, output, more); err != nil {
		return nil, nil, err
	}
	c := Default()
	if err := c.readAll(file); err != nil {
		return nil, nil, err
	}
	if _, err := parse(c, &file, arguments, io.Discard, more); err != nil {
		return nil, nil, err
	}
	return c, words, c.finish()
}

// finish is the end of every load: paths are resolved once, here, and then checked.
func (c *Config) finish() error {
	for _, path := range []*string{&c.Root, &c.State, &c.NetnsDir} {
		*path = resolved(*path)
	}
	return c.Check()
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

func parse(c *Config, file *string, arguments []string, output io.Writer, more []func(*flag.FlagSet)) (words []string, err error) {
	set := flag.NewFlagSet("minicri", flag.ContinueOnError)
	set.SetOutput(output)
	c.Flags(set, file)
	for _, add := range more {
		add(set)
	}
	for {
		if err := set.Parse(arguments); err != nil {
			return nil, err
		}
		if set.NArg() == 0 {
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
		set.StringVar(value, strings.ReplaceAll(key, "_", "-"), *value, commentOf(key))
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

// commentOf is the comment of a key that is in no table.
func commentOf(key string) string {
	kind := reflect.TypeFor[Config]()
	for i := range kind.NumField() {
		if tag := kind.Field(i).Tag; tag.Get("toml") == key {
			return tag.Get("comment")
		}
	}
	return ""
}

// File is the configuration file that Load reads for the given flags.
func File(arguments []string) string {
	var file string
	if _, err := parse(Default(), &file, arguments, io.Discard, nil); err != nil || file == "" {
		return DefaultFile
	}
	return file
}

// readAll reads the file and its drop-ins.
func (c *Config) readAll(file string) error {
	named := file != ""
	if !named {
		file = DefaultFile
	}
	err := c.ReadFile(file)
	if err != nil && (named || !errors.Is(err, fs.ErrNotExist)) {
		return err
	}
	dropIns, err := filepath.Glob(filepath.Join(file+".d", "*.toml"))
	if err != nil {
		return err
	}
	slices.Sort(dropIns)
	for _, dropIn := range dropIns {
		if err := c.ReadFile(dropIn); err != nil {
			return err
		}
	}
	return nil
}

// LoadFile reads and checks a file with its drop-ins, FILE.d/*.toml, as a daemon
// that is given the file and no other flag does.
func LoadFile(file string) (*Config, error) {
	c := Default()
	if err := c.readAll(file); err != nil {
		return nil, err
	}
	return c, c.finish()
}

// ReadFile reads one file over what is there already. A key that does not
// exist, or a value of a wrong kind, is an error with file and line.
func (c *Config) ReadFile(file string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	err = toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields().Decode(c)
	var unknown *toml.StrictMissingError
	var wrong *toml.DecodeError
	switch {
	case errors.As(err, &unknown):
		first := unknown.Errors[0]
		line, _ := first.Position()
		return fmt.Errorf("%s:%d: unknown key %q: 'minicri config default' lists all keys", file, line, dotted(first.Key()))
	case errors.As(err, &wrong):
		line, column := wrong.Position()
		return fmt.Errorf("%s:%d:%d: %w", file, line, column, err)
	case err != nil:
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}

func dotted(key toml.Key) string {
	var b bytes.Buffer
	for i, part := range key {
		if i > 0 {
			b.WriteByte('.')
		}
		b.WriteString(part)
	}
	return b.String()
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
