package main

import (
	"reflect"
	"slices"
	"testing"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/test/harness"
)

// changeAll makes every key of a configuration another one.
func changeAll(t *testing.T, table reflect.Value) {
	t.Helper()
	for i := range table.NumField() {
		switch field := table.Field(i); field.Kind() {
		case reflect.Struct:
			changeAll(t, field)
		case reflect.Bool:
			field.SetBool(!field.Bool())
		case reflect.String:
			field.SetString(field.String() + "x")
		case reflect.Int, reflect.Int64:
			field.SetInt(field.Int() + 1)
		case reflect.Float64:
			field.SetFloat(field.Float() + 1)
		case reflect.Slice:
			field.Set(reflect.Append(field, reflect.Zero(field.Type().Elem())))
		case reflect.Map:
			changed := reflect.MakeMap(field.Type())
			changed.SetMapIndex(reflect.ValueOf("x"), reflect.Zero(field.Type().Elem()))
			field.Set(changed)
		default:
			t.Fatalf("a key of the kind %v", field.Kind())
		}
	}
}

// Each key is either in force after a reload or named as one that needs a restart, never both and never neither.
func TestEachKeyIsReloadedOrNamed(t *testing.T) {
	before, fresh := config.Default(), config.Default()
	changeAll(t, reflect.ValueOf(fresh).Elem())
	now := before.Reloaded(fresh)
	keys := func(was, is *config.Config) []string {
		return changedKeys(reflect.ValueOf(was).Elem(), reflect.ValueOf(is).Elem(), "")
	}
	all, applied := keys(before, fresh), keys(before, now)
	harness.Want(t, len(all) >= 60, "only %d keys: %q", len(all), all)
	for _, key := range all {
		harness.Same(t, key+" is in force", slices.Contains(applied, key), config.IsReloaded(key))
	}
	for _, key := range []string{"log_level", "limits.cni_add", "limits.shutdown", "runtimes", "default_network.enabled", "images.certs_dirs", "nri.required_plugins", "nri.request_timeout", "nri.enabled", "nri.socket"} {
		harness.Want(t, slices.Contains(applied, key), "%s is not reloaded", key)
	}
}
