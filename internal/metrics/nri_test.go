package metrics

import (
	"fmt"
	"testing"
)

// Plugins that come under ever new names do not make ever new rows; those that
// were there before keep theirs.
func TestNamesOfPluginsAreBounded(t *testing.T) {
	names := newNames()
	rows := make(map[string]bool)
	for i := range 10 * mostPlugins {
		rows[names.label(fmt.Sprint("10-plugin-", i))] = true
	}
	if len(rows) != mostPlugins+1 || !rows[other] {
		t.Errorf("%d rows, want %d and %q", len(rows), mostPlugins, other)
	}
	if got := names.label("10-plugin-0"); got != "10-plugin-0" {
		t.Errorf("the first plugin is %q now", got)
	}
}
