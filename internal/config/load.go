package config

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// DefaultFile is read if it is there, when no other file is named.
const DefaultFile = "/etc/minicri/config.toml"

// Load reads the configuration for the given flags. A file that is named has
// to be there. Help, and what is wrong with a flag, is written to the output.
// Commands that have flags of their own beside the daemon's add them with more.
func Load(arguments []string, output io.Writer, more ...func(*flag.FlagSet)) (*Config, error) {
	// Once to find the file, and again over what it says.
	var file string
	if err := parse(Default(), &file, arguments, output, more); err != nil {
		return nil, err
	}
	c := Default()
	if err := c.readAll(file); err != nil {
		return nil, err
	}
	if err := parse(c, &file, arguments, io.Discard, more); err != nil {
		return nil, err
	}
	return c, c.Check()
}

func parse(c *Config, file *string, arguments []string, output io.Writer, more []func(*flag.FlagSet)) error {
	set := flag.NewFlagSet("minicri", flag.ContinueOnError)
	set.SetOutput(output)
	set.StringVar(file, "config", "", "TOML file to read (default "+DefaultFile+" if it is there), and the drop-ins FILE.d/*.toml")
	set.StringVar(&c.Socket, "socket", c.Socket, "unix socket to serve the CRI on")
	set.StringVar(&c.Root, "root", c.Root, "directory for what has to survive a reboot")
	set.StringVar(&c.State, "state", c.State, "directory for what ends with the machine")
	set.StringVar(&c.NetnsDir, "netns-dir", c.NetnsDir, "directory to pin network namespaces in")
	set.StringVar(&c.CNIConf, "cni-conf-dir", c.CNIConf, "directory of network configurations")
	set.StringVar(&c.CNIBin, "cni-bin-dir", c.CNIBin, "directories of network plugins, with ':' between them")
	set.StringVar(&c.Shim, "shim", c.Shim, "the shim (default minicri-shim beside the daemon)")
	set.StringVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
	certs := directories{&c.Images.CertsDirs, false}
	set.Var(&certs, "certs-dir", "directory with HOST/hosts.toml for registries; may be given several times")
	for _, add := range more {
		add(set)
	}
	if err := set.Parse(arguments); err != nil {
		return err
	}
	if set.NArg() > 0 {
		return fmt.Errorf("%q is neither a command nor a flag of minicri: see minicri --help", set.Arg(0))
	}
	return nil
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

// directories is a flag that may be given several times; the first one takes
// the place of what was there.
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
