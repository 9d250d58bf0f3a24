package stdio

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/stdio/crilog"
)

// FuzzSpool: whatever a predecessor has left in the spool and in the log, what a
// container wrote before that stays in the log, and all that comes are whole lines.
func FuzzSpool(f *testing.F) {
	const written = "2026-11-23T00:00:00Z stdout F before\n"
	f.Add(int64(spoolData), int64(len(written)), true, []byte("data\n"), []byte("2026-11-23T00:00:01Z stdout F lin"))
	f.Add(int64(spoolData+2), int64(len(written)), false, []byte("data\nline"), []byte("2026-11-23T00:00:01Z stdout F ta\n"))
	f.Add(int64(-1), int64(-1), true, []byte{0xc0, 0xff}, []byte("2026-11-23T00:00:01Z stdout P \n \n"))
	f.Add(int64(1)<<62, int64(1)<<62, true, []byte("\n"), []byte("\n"))
	f.Add(int64(0), int64(0), true, make([]byte, crilog.MaxLine-1), []byte("")) // leaves a line that is nearly full
	f.Fuzz(func(t *testing.T, start, offset int64, same bool, data, after []byte) {
		dir := t.TempDir()
		logPath, path := filepath.Join(dir, "log"), filepath.Join(dir, "spool")
		must(t, os.WriteFile(logPath, append([]byte(written), after...), 0o600))
		if offset >= 0 && offset < int64(len(written)) {
			offset += int64(len(written)) // no supervisor has begun behind what another wrote
		}
		var info unix.Stat_t
		must(t, unix.Stat(logPath, &info))
		if !same {
			info.Ino++
		}
		header := make([]byte, spoolData)
		binary.NativeEndian.PutUint64(header, uint64(start))
		binary.NativeEndian.PutUint64(header[8:], info.Ino)
		binary.NativeEndian.PutUint64(header[16:], uint64(offset))
		must(t, os.WriteFile(path, append(header, data...), 0o600))
		log, err := crilog.Open(logPath)
		must(t, err)
		s, err := openSpool(path)
		must(t, err)
		defer s.close()
		s.entries = log.Stream("stdout")
		_ = s.resume(log, "stdout")
		_, _ = s.entries.Write([]byte("\nlater\n")) // behind the line that was left, which may be full in the middle of a word
		must(t, log.Close())
		content, err := os.ReadFile(logPath)
		if err != nil || !strings.HasPrefix(string(content), written) || !strings.HasSuffix(string(content), "later\n") {
			t.Errorf("%v: the log has %q", err, content)
		}
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
