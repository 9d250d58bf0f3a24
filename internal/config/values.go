package config

import (
	"cmp"
	"fmt"
	"net"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/distribution/reference"
	"github.com/docker/go-units"
)

// eachField calls do for each field of a table, with its key and its tags, and for those
// of the tables in it.
func eachField(table reflect.Value, prefix string, do func(key string, value reflect.Value, tag reflect.StructTag)) {
	for i := range table.NumField() {
		tag := table.Type().Field(i).Tag
		key := prefix + tag.Get("toml")
		do(key, table.Field(i), tag)
		if table.Field(i).Kind() == reflect.Struct {
			eachField(table.Field(i), key+".", do)
		}
	}
}

// checkTags checks each field by its tags, the fields of tables too.
func (p *problems) checkTags(table reflect.Value, prefix string) {
	eachField(table, prefix, func(key string, field reflect.Value, tag reflect.StructTag) {
		switch value := field.Interface().(type) {
		case Duration:
			p.checkDuration(key, value, tag)
		case int:
			p.checkNumber(key, int64(value), tag)
		case int64:
			p.checkNumber(key, value, tag)
		case string:
			p.checkText(key, value, tag.Get("need"))
		case []string:
			for _, text := range value {
				p.checkText(key, text, tag.Get("need"))
			}
			p.checkNames(key, value, tag.Get("need"))
		}
	})
}

// shortest is less than any duration can be meant. TOML lets a number without
// a unit through as nanoseconds; this refuses it.
const shortest = Duration(time.Millisecond)

func (p *problems) checkDuration(key string, value Duration, tag reflect.StructTag) {
	zero, zeroAllowed := tag.Lookup("zero")
	switch {
	case value >= shortest, value == 0 && zeroAllowed:
	case zeroAllowed:
		p.add(key, "%v is too short: write a duration with its unit, as in '5s', or '0s' for %s", time.Duration(value), zero)
	default:
		p.add(key, "%v is too short: write a duration with its unit, as in '5s'", time.Duration(value))
	}
}

func (p *problems) checkNumber(key string, value int64, tag reflect.StructTag) {
	least, err := strconv.ParseInt(tag.Get("least"), 10, 64)
	if err == nil && value < least {
		p.add(key, "%d is less than %d", value, least)
	}
	most, err := strconv.ParseInt(tag.Get("most"), 10, 64)
	if err == nil && value > most {
		p.add(key, "%d is more than %d", value, most)
	}
}

// checkNames refuses two values of one name, of which one would be without effect.
func (p *problems) checkNames(key string, values []string, need string) {
	if need != "ulimit" && need != "pair" && need != "sysctl" {
		return
	}
	seen := map[string]bool{}
	for _, text := range values {
		name, _, _ := strings.Cut(text, "=")
		if seen[name] {
			p.add(key, "%q is named twice", name)
		}
		seen[name] = true
	}
}

// capability is the form of a name; those that the machine does not have are left out.
var capability = regexp.MustCompile(`^(CAP_)?[A-Z_]+$`)

// sysctlName is a path below /proc/sys in either form of sysctl.d(5).
var sysctlName = regexp.MustCompile(`^[^\s./]+([./][^\s./]+)+$`)

// checkText checks a text by its need tag.
func (p *problems) checkText(key, text, need string) {
	need, optional := strings.CutSuffix(need, "?")
	if text == "" && optional {
		return
	}
	if strings.ContainsRune(text, 0) { // no system call could pass it on
		p.add(key, "%q contains a NUL", text)
		return
	}
	switch need {
	case "path":
		p.checkPath(key, text)
	case "paths":
		for _, path := range filepath.SplitList(cmp.Or(text, ":")) {
			p.checkPath(key, path)
		}
	case "endpoint":
		p.checkEndpoint(key, text)
	case "ulimit":
		if _, err := units.ParseUlimit(text); err != nil {
			p.add(key, "%v: write it as in 'nofile=1024:524288'", err)
		}
	case "pair":
		if name, _, found := strings.Cut(text, "="); !found || name == "" {
			p.add(key, "%q is not a name and a value with '=' between them", text)
		}
	case "sysctl":
		if name, _, found := strings.Cut(text, "="); !found || !sysctlName.MatchString(name) {
			p.add(key, "%q is not the name of a kernel parameter and its value: write it as in 'net.ipv4.tcp_syncookies=1'", text)
		}
	case "capability":
		if !capability.MatchString(text) {
			p.add(key, "%q is no capability: write it as in 'CAP_CHOWN'", text)
		}
	case "profile":
		if ref, local := strings.CutPrefix(text, "localhost/"); text != "runtime/default" && text != "unconfined" && (!local || ref == "") {
			p.add(key, "%q is neither 'runtime/default', 'unconfined' nor 'localhost/' and a profile", text)
		}
	case "pattern":
		if _, err := path.Match(text, ""); err != nil || text == "" {
			p.add(key, "%q is not a pattern as path.Match of Go has it", text)
		}
	case "reference":
		if _, err := reference.ParseDockerRef(text); err != nil {
			p.add(key, "%q is no image reference: %v", text, err)
		}
	}
}

func (p *problems) checkPath(key, path string) {
	if !filepath.IsAbs(path) {
		p.add(key, "%q is not an absolute path", path)
	}
}

func (p *problems) checkEndpoint(key, address string) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		p.add(key, "%v: write it as in '127.0.0.1:9440'", err)
	} else if _, err := net.LookupPort("tcp", port); err != nil {
		p.add(key, "%q has no valid port: write it as in '127.0.0.1:9440'", address)
	}
}

// Key is one key of the configuration, for people.
type Key struct {
	// Name is the key with its table: "limits.run".
	Name string
	// Table says that it is a table; the keys in it follow.
	Table bool
	// Kind is the form of its value: text, duration, number with its least and
	// largest value, true or false, list.
	Kind string
	// Default is the default as it is written in a file.
	Default string
	// Zero is what a zero means, "" where it has no meaning of its own.
	Zero    string
	Comment string
	// Flag is the flag of the same meaning, "" if there is none.
	Flag string
	// Reload says that it takes effect without a restart.
	Reload bool
}

// Keys are all keys, tables after the keys that are in none.
func Keys() []Key {
	c := Default()
	flags := c.flagKeys()
	keys := keysOf(reflect.ValueOf(c).Elem(), "")
	for i := range keys {
		if flags[keys[i].Name] != nil {
			keys[i].Flag = strings.ReplaceAll(keys[i].Name, "_", "-")
		}
	}
	return keys
}

func keysOf(table reflect.Value, prefix string) (keys []Key) {
	eachField(table, prefix, func(name string, value reflect.Value, tag reflect.StructTag) {
		key := Key{Name: name, Comment: tag.Get("comment"), Zero: tag.Get("zero"), Reload: IsReloaded(name)}
		switch value.Kind() {
		case reflect.Struct:
			key.Table = true
			keys = append(keys, key)
		case reflect.Map:
			key.Table, key.Name = true, name+".NAME"
			keys = append(append(keys, key), keysOf(reflect.Zero(value.Type().Elem()), key.Name+".")...)
		default:
			key.Kind, key.Default = form(value, tag)
			keys = append(keys, key)
		}
	})
	return keys
}

// Value is what one key has.
type Value struct {
	// Name is the key with its table, Text the value as a file has it.
	Name, Text string
	// Source is "default", FILE:LINE or a flag.
	Source string
}

// Values are all keys with what they have.
func (l *Loaded) Values() []Value {
	values := valuesOf(reflect.ValueOf(l.Config).Elem(), "")
	for i, v := range values {
		values[i].Source = cmp.Or(l.Sources[v.Name], "default")
	}
	return values
}

func valuesOf(table reflect.Value, prefix string) (values []Value) {
	eachField(table, prefix, func(name string, value reflect.Value, tag reflect.StructTag) {
		switch value.Kind() {
		case reflect.Struct: // its fields follow
		case reflect.Map:
			for _, key := range slices.SortedFunc(slices.Values(value.MapKeys()), func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) }) {
				values = append(values, valuesOf(value.MapIndex(key), name+"."+key.String()+".")...)
			}
		default:
			_, text := form(value, tag)
			values = append(values, Value{Name: name, Text: text})
		}
	})
	return values
}

// form is the kind of a value and the value as it is written.
func form(v reflect.Value, tag reflect.StructTag) (kind, text string) {
	switch value := v.Interface().(type) {
	case Duration:
		return "duration", fmt.Sprintf("'%v'", time.Duration(value))
	case string:
		return "text", quoted(value)
	case bool:
		return "true or false", fmt.Sprint(value)
	case []string:
		if len(value) == 0 {
			return "list of texts", "[]"
		}
		var texts []string
		for _, text := range value {
			texts = append(texts, quoted(text))
		}
		return "list of texts", "[" + strings.Join(texts, ", ") + "]"
	default:
		return fmt.Sprintf("number, %s to %s", tag.Get("least"), tag.Get("most")), fmt.Sprint(value)
	}
}

// quoted is a text of TOML.
func quoted(text string) string {
	if strings.ContainsAny(text, "'\n\r") {
		return strconv.Quote(text)
	}
	return "'" + text + "'"
}
