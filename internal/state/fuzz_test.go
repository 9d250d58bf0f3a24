package state

import (
	"errors"
	"os"
	"strings"
	"testing"
)

// FuzzRecords: a record that is damaged is quarantined, and the others are
// read; one of a later schema refuses all, by name.
func FuzzRecords(f *testing.F) {
	f.Add([]byte(`{"version":1,"record":{"Name":"x"}}`))
	f.Add([]byte(`{"version":99,"record":{}}`))
	f.Add([]byte(`{"version":1,"rec`))
	f.Add([]byte(``))
	f.Fuzz(func(t *testing.T, data []byte) {
		type record struct{ Name string }
		records, err := Open[record](t.TempDir(), 1, false)
		must(t, err)
		must(t, records.Write("good", record{Name: "kept"}))
		must(t, os.WriteFile(records.Path("other"), data, 0o600))
		all, bad, err := records.Load()
		if errors.Is(err, ErrLaterSchema) && strings.Contains(err.Error(), records.Path("other")) {
			return
		}
		if err != nil || all["good"].Name != "kept" || len(all)+len(bad) != 2 {
			t.Errorf("%v, %v, %v", all, bad, err)
		}
	})
}
