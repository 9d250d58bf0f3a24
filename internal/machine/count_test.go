package machine

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

func TestCount(t *testing.T) {
	for text, want := range map[string]uint64{"0\n": 1, "0-1\n": 2, "0-3,8-127\n": 128, "": 0, "all": 0} {
		file := filepath.Join(t.TempDir(), "possible")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := count(file); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
	if got := count("/no/such/file"); got != 0 {
		t.Errorf("without the file: %d", got)
	}
	if got := memoryNodes("/no/such/file"); got != 1 {
		t.Errorf("a kernel without NUMA has %d memory nodes, want 1", got)
	}
	if m, err := Read(t.TempDir()); err != nil || m.CPUs < uint64(runtime.NumCPU()) || m.MemoryNodes == 0 {
		t.Errorf("this machine has %d CPUs and %d memory nodes: %v", m.CPUs, m.MemoryNodes, err)
	}
}
