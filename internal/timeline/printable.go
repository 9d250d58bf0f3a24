package timeline

import (
	"reflect"

	"github.com/minicri/minicri/internal/redact"
)

// printable returns a copy of what is shown on a terminal, with all of its texts as
// redact.Line has them: whoever wrote them, a pod's author, an image, a plugin, a
// registry, must not write to the terminal of who reads them, nor rows of their own.
func printable[T any](value T) T {
	return copyPrintable(reflect.ValueOf(value)).Interface().(T)
}

func copyPrintable(from reflect.Value) reflect.Value {
	to := reflect.New(from.Type()).Elem()
	to.Set(from)
	switch from.Kind() {
	case reflect.String:
		to.SetString(redact.Line(from.String()))
	case reflect.Pointer:
		if !from.IsNil() {
			to.Set(reflect.New(from.Type().Elem()))
			to.Elem().Set(copyPrintable(from.Elem()))
		}
	case reflect.Struct:
		for i := range from.NumField() {
			if from.Type().Field(i).IsExported() {
				to.Field(i).Set(copyPrintable(from.Field(i)))
			}
		}
	case reflect.Slice:
		if from.IsNil() || from.Type().Elem().Kind() == reflect.Uint8 { // JSON, which is not shown
			break
		}
		to.Set(reflect.MakeSlice(from.Type(), from.Len(), from.Len()))
		for i := range from.Len() {
			to.Index(i).Set(copyPrintable(from.Index(i)))
		}
	case reflect.Map:
		if from.IsNil() {
			break
		}
		to.Set(reflect.MakeMap(from.Type()))
		for entries := from.MapRange(); entries.Next(); {
			to.SetMapIndex(copyPrintable(entries.Key()), copyPrintable(entries.Value()))
		}
	}
	return to
}
