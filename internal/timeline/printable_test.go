package timeline

import (
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"
)

// marks are the sequences that this package writes itself.
var marks = regexp.MustCompile("\x1b\\[(0|1|2|31|32|33)m")

// FuzzTerminal puts a text wherever there is one in what is shown.
func FuzzTerminal(f *testing.F) {
	for _, text := range []string{"\x1b]0;PWNED\x07", "\u009b31m", "\xff\x1b[2J", "a\rb\bc", "\u202etxt.exe", "a\nb\tc", "\x1b[31m"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var pod Pod
		fillTexts(reflect.ValueOf(&pod).Elem(), text)
		glance := Glance{Pods: make([]Line, 1)}
		fillTexts(reflect.ValueOf(&glance).Elem(), text)
		for _, color := range []bool{false, true} {
			var b strings.Builder
			for _, err := range []error{
				pod.Text(&b, Style{Color: color}), List(&b, []Pod{pod}, time.Now(), Style{Color: color}), glance.Table(&b, &glance, Style{Color: color}),
			} {
				if err != nil {
					t.Error(err)
				}
			}
			shown := b.String()
			if color {
				shown = marks.ReplaceAllString(shown, "")
			}
			for _, r := range shown {
				if r != '\n' && !unicode.IsPrint(r) {
					t.Fatalf("%q is shown of %q", r, text)
				}
			}
		}
		if text != "" && pod.Name != text {
			t.Errorf("the pod has changed: %q", pod.Name)
		}
	})
}

// fillTexts sets every text in a value, and makes one of each that there can be any
// number of.
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
