package runner

import (
	"os/exec"
	"testing"
)

// BenchmarkPlugin is what a run of one plugin costs, with all that the daemon does for
// it, and what the plugin costs alone.
func BenchmarkPlugin(b *testing.B) {
	b.Run("alone", func(b *testing.B) {
		for b.Loop() {
			must(b, exec.Command("/bin/true").Run())
		}
	})
	for name, parent := range parents(b) {
		b.Run(name, func(b *testing.B) {
			r, err := Open(parent, "unit-")
			must(b, err)
			for b.Loop() {
				run, err := r.Begin(Request{Verb: "CHECK", ID: "web", Plugins: 1, Limit: within})
				must(b, err)
				_, err = run.ExecPlugin(b.Context(), "/bin/true", nil, nil)
				must(b, err)
				must(b, run.End())
			}
		})
	}
}
