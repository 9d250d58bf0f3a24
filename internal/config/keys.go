package config

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

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
	for i := range table.NumField() {
		field := table.Type().Field(i)
		key := Key{Name: prefix + field.Tag.Get("toml"), Comment: field.Tag.Get("comment"), Zero: field.Tag.Get("zero")}
		key.Reload = IsReloaded(key.Name)
		switch value := table.Field(i); value.Kind() {
		case reflect.Struct:
			key.Table = true
			keys = append(append(keys, key), keysOf(value, key.Name+".")...)
		case reflect.Map:
			key.Table, key.Name = true, key.Name+".NAME"
			keys = append(append(keys, key), keysOf(reflect.New(field.Type.Elem()).Elem(), key.Name+".")...)
		default:
			key.Kind, key.Default = form(value, field.Tag)
			keys = append(keys, key)
		}
	}
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
	for i := range table.NumField() {
		field := table.Type().Field(i)
		name := prefix + field.Tag.Get("toml")
		switch value := table.Field(i); value.Kind() {
		case reflect.Struct:
			values = append(values, valuesOf(value, name+".")...)
		case reflect.Map:
			for _, key := range slices.SortedFunc(slices.Values(value.MapKeys()), func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) }) {
				values = append(values, valuesOf(value.MapIndex(key), name+"."+key.String()+".")...)
			}
		default:
			_, text := form(value, field.Tag)
			values = append(values, Value{Name: name, Text: text})
		}
	}
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
