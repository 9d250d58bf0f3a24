package timeline

import (
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/minicri/minicri/test/harness"
)

// marks are the sequences that this package writes itself.
var marks = regexp.MustCompile("\x1b\\[(0|1|2|31|32|33)m")

// FuzzTerminal puts a text wherever there is one in what is shown.
func FuzzTerminal(f *testing.F) {
	for _, text := range []string{"\x1b]0;PWNED\x07", "\u009b31m", "\xff\x1b[2J", "a\rb\bc", "\u202etxt.exe", "a\nb\tc", "\x1b[31m"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, style := range []Style{{}, {Color: true}, {Width: 80, Height: 24}, {Color: true, Width: 30, Height: 5, Wide: true}} {
			shown := shownOf(t, text, style)
			if style.Color {
				shown = marks.ReplaceAllString(shown, "")
			}
			for _, r := range shown {
				harness.Need(t, r == '\n' || unicode.IsPrint(r), "%q is shown of %q", r, text)
			}
			// A text makes no rows of its own.
			if spaced := strings.ReplaceAll(text, "\n", " "); spaced != text && shownOf(t, spaced, Style{Width: style.Width, Height: style.Height, Wide: style.Wide}) != shown {
				t.Errorf("%q is shown with its lines:\n%s", text, shown)
			}
		}
	})
}

// shownOf is what is shown of things that have a text everywhere.
func shownOf(t *testing.T, text string, style Style) string {
	var pod Pod
	fillTexts(reflect.ValueOf(&pod).Elem(), text)
	glance := Glance{Pods: make([]Line, 1)}
	fillTexts(reflect.ValueOf(&glance).Elem(), text)
	var b strings.Builder
	for _, err := range []error{pod.Text(&b, style), List(&b, []Pod{pod}, time.Now(), style), glance.Table(&b, &glance, style)} {
		harness.Check(t, err)
	}
	harness.Want(t, text == "" || pod.Name == text, "the pod has changed: %q", pod.Name)
	return b.String()
}

// fillTexts sets every text in a value, and makes one of each that there can be any number of.
func fillTexts(value reflect.Value, text string) {
	switch value.Kind() {
	case reflect.String:
		value.SetString(text)
	case reflect.Struct:
		for i := range value.NumField() {
			if value.Type().Field(i).IsExported() {
				fillTexts(value.Field(i), text)
			}
		}
	case reflect.Pointer:
		value.Set(reflect.New(value.Type().Elem()))
		fillTexts(value.Elem(), text)
	case reflect.Slice:
		if value.Type().Elem().Kind() != reflect.Uint8 {
			value.Set(reflect.MakeSlice(value.Type(), 1, 1))
			fillTexts(value.Index(0), text)
		}
	case reflect.Map:
		entry := reflect.New(value.Type().Elem()).Elem()
		fillTexts(entry, text)
		value.Set(reflect.MakeMap(value.Type()))
		value.SetMapIndex(reflect.ValueOf(text).Convert(value.Type().Key()), entry)
	}
}
