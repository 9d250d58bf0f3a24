package stdio

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/stdio/crilog"
	"github.com/minicri/minicri/supervisor/stdio/journal"
)

// FuzzJournal: whatever a predecessor has left in the journal and in the log, what a
// container wrote before that stays in the log, and all that comes are whole lines.
func FuzzJournal(f *testing.F) {
	const written = "2026-11-23T00:00:00Z stdout F before\n"
	for phase := range uint64(7) {
		f.Add(phase|3<<16|5<<32, int64(len(written)), true, []byte("data\n"), []byte("2026-11-23T00:00:01Z stdout F lin"))
	}
	f.Add(uint64(3|0xffff<<16|0xffffffff<<32), int64(-1), true, []byte{0xc0, 0xff}, []byte("2026-11-23T00:00:01Z stdout P \n \n"))
	f.Add(uint64(0xffffffffffff0042), int64(-1), true, []byte("\n"), []byte("\n")) // leaves a line that is nearly full
	f.Fuzz(func(t *testing.T, word uint64, offset int64, same bool, data, after []byte) {
		dir := t.TempDir()
		logPath, journalPath := filepath.Join(dir, "log"), filepath.Join(dir, "journal")
		if err := os.WriteFile(logPath, append([]byte(written), after...), 0o600); err != nil {
			t.Fatal(err)
		}
		if offset >= 0 && offset < int64(len(written)) {
			offset += int64(len(written)) // no supervisor has begun behind what another wrote
		}
		leave(t, journalPath, logPath, word, offset, same, data)
		found, err := journal.Open(journalPath)
		if err != nil {
			t.Fatal(err)
		}
		defer found.Close()
		log, err := crilog.Open(logPath)
		if err != nil {
			t.Fatal(err)
		}
		j := &journaled{journal: found, owner: "c.stdout"}
		j.entries = log.Stream("stdout", j)
		_ = j.resume(log, "stdout")
		_, _ = j.entries.Write([]byte("\nlater\n")) // behind the line that was left, which may be full in the middle of a word
		if err := log.Close(); err != nil {
			t.Fatal(err)
		}
		content, err := os.ReadFile(logPath)
		if err != nil || !strings.HasPrefix(string(content), written) || !strings.HasSuffix(string(content), "later\n") {
			t.Errorf("%v: the log has %q", err, content)
		}
	})
}

// leave makes the journal of a supervisor that was killed: one slot has the word, the
// place in the log and the data.
func leave(t *testing.T, path, log string, word uint64, offset int64, same bool, data []byte) {
	t.Helper()
	made, err := journal.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	made.Acquire("c.stdout").Keep([]byte("line"))
	if err := made.Close(); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	at := strings.Index(string(content), "c.stdout") - 26
	var info unix.Stat_t
	if err := unix.Stat(log, &info); err != nil {
		t.Fatal(err)
	}
	if !same {
		info.Ino++
	}
	slot := content[at:]
	binary.NativeEndian.PutUint64(slot, word)
	binary.NativeEndian.PutUint64(slot[8:], info.Ino)
	binary.NativeEndian.PutUint64(slot[16:], uint64(offset))
	copy(slot[4096:][:journal.BufferSize], data)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
}
