package config

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

// Loaded is a configuration with what is to be said about its files. Commands that look
// at a node work with it whatever is wrong; the daemon refuses one with Broken parts.
type Loaded struct {
	*Config
	// Sources say where the values are from that are not the default: "FILE:LINE", or
	// the flag.
	Sources map[string]string
	// Unknown are keys that this build does not have, with file and line. They are
	// without effect: another build may have written them.
	Unknown []error
	// Broken lists files that cannot be used, and single values that cannot. Nothing of
	// such a file counts; such a value is replaced by its default.
	Broken []error
}

// Strict is an error for all that is not as it should be.
func (l *Loaded) Strict() error { return errors.Join(slices.Concat(l.Unknown, l.Broken)...) }

// Locate adds file and line, or the flag, to an error that begins with a key.
func (l *Loaded) Locate(err error) error {
	if source := l.Sources[keyOf(err)]; source != "" {
		return fmt.Errorf("%s: %w", source, err)
	}
	return err
}

// keyOf is the key that an error of Check begins with.
func keyOf(err error) string {
	key, _, _ := strings.Cut(err.Error(), ": ")
	key, _, _ = strings.Cut(key, ",")
	return key
}

// reset gives a key its default; one that a handler has is the handler's zero value.
func (l *Loaded) reset(key string) {
	to, from := reflect.ValueOf(l.Config).Elem(), reflect.ValueOf(Default()).Elem()
	for name := range strings.SplitSeq(key, ".") {
		i := slices.IndexFunc(reflect.VisibleFields(to.Type()), func(f reflect.StructField) bool { return f.Tag.Get("toml") == name })
		if i < 0 {
			return
		}
		to, from = to.Field(i), from.Field(i)
		if to.Kind() != reflect.Struct {
			to.Set(from)
			return
		}
	}
}

// readAll reads the file and its drop-ins.
func (l *Loaded) readAll(file string) {
	named := file != ""
	if !named {
		file = DefaultFile
	}
	if err := l.readFile(file); err != nil && (named || !errors.Is(err, fs.ErrNotExist)) {
		l.Broken = append(l.Broken, err)
	}
	for _, dropIn := range DropIns(file) {
		if err := l.readFile(dropIn); err != nil {
			l.Broken = append(l.Broken, err)
		}
	}
}

// DropIns are the drop-ins of a file, by name.
func DropIns(file string) []string {
	paths, _ := filepath.Glob(filepath.Join(file+".d", "*.toml")) // the pattern is fine
	slices.Sort(paths)
	return paths
}

// readFile reads one file over what is there already. A value of a wrong kind is an
// error with file and line; then nothing of the file counts.
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

// linesOf are the keys of a file and the lines they are on.
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

// addLines adds those of a key, or of all keys of an inline table.
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
