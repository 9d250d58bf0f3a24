package config

import (
	"reflect"
	"strings"
)

// reloadTag is on the keys and tables that a running daemon puts into force.
const reloadTag = "reload"

// IsReloaded reports whether a change of the key, "limits.run" say, takes effect
// without a restart of the daemon.
func IsReloaded(key string) bool {
	first, _, _ := strings.Cut(key, ".")
	kind := reflect.TypeFor[Config]()
	for i := range kind.NumField() {
		if tag := kind.Field(i).Tag; tag.Get("toml") == first {
			return tag.Get(reloadTag) != ""
		}
	}
	return false
}

// Reloaded is the configuration with those keys of a fresh one that are reloaded.
func (c *Config) Reloaded(fresh *Config) *Config {
	next := *c
	from, to := reflect.ValueOf(fresh).Elem(), reflect.ValueOf(&next).Elem()
	for i := range to.NumField() {
		if to.Type().Field(i).Tag.Get(reloadTag) != "" {
			to.Field(i).Set(from.Field(i))
		}
	}
	return &next
}
