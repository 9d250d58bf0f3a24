package config

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/agext/levenshtein"
	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
	"github.com/spf13/pflag"
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

// Load reads the file that the flags name, or DefaultFile, and its drop-ins. Flags of AddFlags override them.
func Load(flags *pflag.FlagSet) *Loaded {
	l := &Loaded{Config: Default(), Sources: make(map[string]string)}
	named := File(flags)
	file := cmp.Or(named, DefaultFile)
	for _, path := range append([]string{file}, DropIns(file)...) {
		info, err := os.Stat(path)
		switch {
		case err == nil && path != named && !info.Mode().IsRegular(): // a fifo would block the daemon; a user may name one
			err = fmt.Errorf("%s is no regular file", path)
		case err == nil:
			err = l.readFile(path)
		}
		if err != nil && (named != "" || path != file || !errors.Is(err, fs.ErrNotExist)) {
			l.Broken = append(l.Broken, err)
		}
	}
	l.override(flags)
	// Resolve paths before they are checked. A default replaces a refused value.
	// netns_dir keeps its symlinks: agents of networks open CNI_NETNS below a prefix, and have /var/run/netns there.
	for _, path := range []*string{&l.Root, &l.State} {
		*path = resolved(*path)
	}
	for _, problem := range l.problems() {
		l.Broken = append(l.Broken, l.Locate(problem))
		l.reset(keyOf(problem))
	}
	return l
}

// LoadFile loads one file and its drop-ins, without flags.
func LoadFile(file string) (*Loaded, error) {
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	AddFlags(flags)
	err := flags.Set("config", file)
	return Load(flags), err
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

// AddFlags adds the flags that override keys, with the names and comments of their keys.
func AddFlags(flags *pflag.FlagSet) {
	flags.String("config", "", "configuration `FILE` in TOML, with its drop-ins FILE.d/*.toml (default "+DefaultFile+" if it exists)")
	defaults := Default()
	values := defaults.flagKeys()
	for _, key := range slices.Sorted(maps.Keys(values)) {
		flags.String(flagOf(key), *values[key], tagOf(key).Get("comment"))
	}
	flags.StringArray("certs-dir", nil, "`DIRECTORY` searched for HOST/hosts.toml of registries; may be repeated, and replaces images.certs_dirs")
}

func flagOf(key string) string { return strings.ReplaceAll(key, "_", "-") }

// override sets the keys whose flags are given.
func (l *Loaded) override(flags *pflag.FlagSet) {
	for key, value := range l.flagKeys() {
		if f := flags.Lookup(flagOf(key)); f != nil && f.Changed {
			*value = f.Value.String()
			l.Sources[key] = "--" + f.Name
		}
	}
	if f := flags.Lookup("certs-dir"); f != nil && f.Changed {
		l.Images.CertsDirs, _ = flags.GetStringArray(f.Name) // the flag has this type
		l.Sources["images.certs_dirs"] = "--" + f.Name
	}
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

// File returns the file that the flags name, "" for none.
func File(flags *pflag.FlagSet) string {
	if f := flags.Lookup("config"); f != nil {
		return f.Value.String()
	}
	return ""
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

// readFile reads a file over the present values. It reports every unknown key and every value of a wrong kind, and
// uses the others.
func (l *Loaded) readFile(file string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	var document map[string]any
	if err := toml.Unmarshal(data, &document); err != nil {
		if wrong, is := errors.AsType[*toml.DecodeError](err); is {
			line, column := wrong.Position()
			return fmt.Errorf("%s:%d:%d: %w", file, line, column, err)
		}
		return fmt.Errorf("%s: %w", file, err)
	}
	lines := linesOf(data)
	values := valuesIn(document, nil)
	slices.SortStableFunc(values, func(a, b setting) int { return cmp.Compare(lines[a.key()], lines[b.key()]) })
	var wrong []error
	for _, v := range values {
		key := v.key()
		at := fmt.Sprintf("%s:%d", file, lines[key])
		err := v.decode()
		switch {
		case err == nil:
			l.Sources[key] = at
			continue
		case errors.As(err, new(*toml.StrictMissingError)):
			hint := DidYouMean(key, keyNames())
			l.Unknown = append(l.Unknown, fmt.Errorf("%s: unknown key %q%s: 'minicri config default' lists all keys", at, key, hint))
		default:
			wrong = append(wrong, fmt.Errorf("%s: %s: %s is no %s", at, key, v.text(), kindOf(key)))
		}
		delete(v.table, v.path[len(v.path)-1])
	}
	rest, err := toml.Marshal(document)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if err := toml.Unmarshal(rest, l.Config); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return errors.Join(wrong...)
}

// setting is a value of a document, with the table that contains it and its path from the top.
type setting struct {
	table map[string]any
	path  []string
	value any
}

func (s setting) key() string { return strings.Join(s.path, ".") }

// text is the value for an error.
func (s setting) text() string {
	switch reflect.ValueOf(s.value).Kind() {
	case reflect.Map:
		return "a table"
	case reflect.Slice:
		return "a list"
	}
	return fmt.Sprintf("%#v", s.value)
}

func valuesIn(table map[string]any, above []string) (all []setting) {
	for name, value := range table {
		path := append(slices.Clip(above), name)
		if inner, is := value.(map[string]any); is && len(inner) > 0 {
			all = append(all, valuesIn(inner, path)...)
			continue
		}
		all = append(all, setting{table, path, value})
	}
	return all
}

// decode decodes the value alone, strictly, into a default configuration that is then dropped.
func (s setting) decode() error {
	document := s.value
	for _, name := range slices.Backward(s.path) {
		document = map[string]any{name: document}
	}
	text, err := toml.Marshal(document)
	if err != nil {
		return err
	}
	return toml.NewDecoder(bytes.NewReader(text)).DisallowUnknownFields().Decode(Default())
}

// kindOf describes the values of a key.
func kindOf(key string) string {
	if rest, is := strings.CutPrefix(key, "runtimes."); is {
		_, rest, _ = strings.Cut(rest, ".")
		key = "runtimes.NAME." + rest
	}
	for _, k := range Keys() {
		if k.Name == key && !k.Table {
			return k.Kind
		}
	}
	return "table"
}

func keyNames() (names []string) {
	for _, k := range Keys() {
		names = append(names, k.Name)
	}
	return names
}

// DidYouMean returns ": did you mean NAME?" for the known name that is nearest to a word, "" if none is near. A key is
// also near if only its table is missing or wrong.
func DidYouMean(word string, known []string) string {
	last := word[strings.LastIndexByte(word, '.')+1:]
	nearest, least := "", 1+(len(last)+2)/3
	for _, name := range known {
		distance := levenshtein.Distance(word, name, nil)
		if name[strings.LastIndexByte(name, '.')+1:] == last {
			distance = min(distance, 1)
		}
		if distance < least {
			nearest, least = name, distance
		}
	}
	if nearest == "" {
		return ""
	}
	return fmt.Sprintf(": did you mean %q?", nearest)
}

func linesOf(data []byte) map[string]int {
	lines, table := make(map[string]int), ""
	parser := &unstable.Parser{}
	parser.Reset(data)
	for parser.NextExpression() {
		switch expression := parser.Expression(); expression.Kind {
		case unstable.Table, unstable.ArrayTable:
			name, line := keyOfNode(parser, expression)
			lines[name], table = line, name+"."
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
