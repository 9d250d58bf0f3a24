package runner

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// usual are the plugins that a node has installed.
var usual = []string{
	"bandwidth", "bridge", "dhcp", "dummy", "firewall", "host-device", "host-local", "ipvlan", "loopback", "macvlan",
	"portmap", "ptp", "sbr", "static", "tap", "tuning", "vlan", "vrf",
}

// BenchmarkPlugin is what a run of one plugin costs through the runner, with
// all that the daemon does for it, and what the plugin costs alone.
func BenchmarkPlugin(b *testing.B) {
	alone := func(b *testing.B, path string) {
		command := exec.Command(path)
		command.Env = []string{"CNI_COMMAND=ADD"}
		if err := command.Run(); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("alone", func(b *testing.B) {
		for b.Loop() {
			alone(b, "/bin/true")
		}
	})
	for name, parent := range parents(b) {
		b.Run(name, func(b *testing.B) {
			bin := b.TempDir()
			for _, name := range append(usual, "true") {
				if err := os.Symlink("/bin/true", filepath.Join(bin, name)); err != nil {
					b.Fatal(err)
				}
			}
			r, err := Open(Options{Dir: b.TempDir(), Program: filepath.Join(b.TempDir(), "runner"), BinDirs: []string{bin}, Parent: parent, Mark: "unit-"})
			if err != nil {
				b.Fatal(err)
			}
			if _, _, err := r.Runs(); err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() {
				if err := r.Close(); err != nil {
					b.Error(err)
				}
			})
			for b.Loop() {
				run, err := r.Begin(Request{Verb: "ADD", ID: "web", Plugins: []string{"true"}})
				if err != nil {
					b.Fatal(err)
				}
				alone(b, filepath.Join(run.PluginDir(), "true"))
				if _, err := run.Reports(); err != nil {
					b.Fatal(err)
				}
				if err := run.End(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
