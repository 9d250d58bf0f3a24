package config

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// eachField calls do for each field of a table, with its key and its tags, and for those
// of the tables in it, and of the handlers by name.
func eachField(table reflect.Value, prefix string, do func(key string, value reflect.Value, tag reflect.StructTag)) {
	for i := range table.NumField() {
		tag, field := table.Type().Field(i).Tag, table.Field(i)
		key := prefix + tag.Get("toml")
		do(key, field, tag)
		if field.Kind() == reflect.Struct {
			eachField(field, key+".", do)
		}
		if handlers, is := field.Interface().(map[string]Runtime); is {
			for _, name := range slices.Sorted(maps.Keys(handlers)) {
				eachField(reflect.ValueOf(handlers[name]), key+"."+name+".", do)
			}
		}
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
func Keys() (keys []Key) {
	c := Default()
	c.Runtimes = map[string]Runtime{"NAME": {}}
	flags := c.flagKeys()
	eachField(reflect.ValueOf(c).Elem(), "", func(name string, value reflect.Value, tag reflect.StructTag) {
		key := Key{Name: name, Comment: tag.Get("comment"), Zero: tag.Get("zero"), Reload: IsReloaded(name)}
		switch value.Kind() {
		case reflect.Struct:
			key.Table = true
		case reflect.Map:
			key.Table, key.Name = true, name+".NAME"
		default:
			key.Kind, key.Default = form(value, tag)
		}
		if flags[name] != nil {
			key.Flag = strings.ReplaceAll(name, "_", "-")
		}
		keys = append(keys, key)
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
func (l *Loaded) Values() (values []Value) {
	eachField(reflect.ValueOf(l.Config).Elem(), "", func(name string, value reflect.Value, tag reflect.StructTag) {
		if value.Kind() != reflect.Struct && value.Kind() != reflect.Map { // whose fields follow
			_, text := form(value, tag)
			values = append(values, Value{Name: name, Text: text, Source: cmp.Or(l.Sources[name], "default")})
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
