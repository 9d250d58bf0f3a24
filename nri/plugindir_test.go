package nri

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSurveyBesideAFifo: the configuration of a plugin may be anything; a fifo that
// nobody writes holds up nobody, and costs its own plugin only.
func TestSurveyBesideAFifo(t *testing.T) {
	source := Source{Enabled: true, PluginDir: t.TempDir(), ConfigDir: t.TempDir()}
	for _, plugin := range []string{"10-good", "20-fifo"} {
		if err := os.WriteFile(filepath.Join(source.PluginDir, plugin), nil, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(source.ConfigDir, "fifo.conf"), 0o600); err != nil {
		t.Fatal(err)
	}
	plugins, problems := source.Survey()
	if !slices.Equal(plugins, []string{"10-good"}) {
		t.Errorf("plugins that are started: %v", plugins)
	}
	if len(problems) != 1 || !strings.Contains(problems[0].Error(), "20-fifo") || !strings.Contains(problems[0].Error(), "no regular file") {
		t.Errorf("problems: %v", problems)
	}
}
