package main

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/test/harness"
)

// And the program has no command that the list does not have.
func TestEveryCommandIsInTheManual(t *testing.T) {
	source := harness.Read(t, "main.go")
	cases := regexp.MustCompile(`(?m)^\tcase "([a-z]+)":`).FindAllStringSubmatch(string(source), -1)
	harness.Want(t, len(cases) >= 5, "main.go has the cases %q: this test does not find its commands any more", cases)
	for _, found := range cases {
		harness.Want(t, slices.ContainsFunc(manual.Commands(), func(c manual.Command) bool { return strings.Fields(c.Words)[0] == found[1] }),
			"minicri %s is not in internal/manual", found[1])
	}
}

// Help of a command is about that command, however it is asked for; what means nothing is an error of usage.
func TestHelpAndUsage(t *testing.T) {
	for arguments, want := range map[string]string{
		"help image pull": "Usage: minicri image pull REFERENCE", "image pull --help": "Usage: minicri image pull REFERENCE", "image --help": "  minicri image ls",
		"help config": "  minicri config show", "config --help": "  minicri config show", "version --help": "Usage: minicri version", "help help": "Usage: minicri help",
		"timeline web --since 5m -h": "Usage: minicri timeline", "help": manual.Usage(), "--version": "minicri " + version, "-v": "minicri " + version,
	} {
		var output bytes.Buffer
		err := command(t.Context(), strings.Fields(arguments), &output)
		harness.Want(t, err == nil && strings.Contains(output.String(), want), "minicri %s: %v, %s", arguments, err, output.String())
	}
	for _, arguments := range []string{
		"help nothing", "no-such-command", "image", "image fetch", "image pull", "image ls --sockt x", "pods web db", "pods -o x", "check --force", "config", "config nothing", "debug", "--sockt x", "timeline a b", "config default more", "timeline --since -5m", "timeline --slowest -1", "pods --phase NONSENSE",
	} {
		err := command(t.Context(), strings.Fields(arguments), io.Discard)
		_, usage := errors.AsType[usageError](err)
		harness.Want(t, usage && !strings.Contains(err.Error(), "\n"), "minicri %s: %v", arguments, err)
	}
}

func must(t testing.TB, err error) { t.Helper(); harness.Check(t, err) }

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
