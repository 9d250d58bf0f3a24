package crilog

import (
	"os"
	"path/filepath"
	"testing"
)

// noted keeps where entries were about to be written.
type noted struct {
	inode  uint64
	offset int64
}

// What a write that was cut off at any byte has brought to the log is told by
// the log itself, and its successor writes the rest.
func TestResume(t *testing.T) {
	const before, data = "the begin", "ning\nwhole\nlast with no end"
	reference := filepath.Join(t.TempDir(), "0.log")
	written, at := logOnce(t, reference, before, data)
	for cut := at.offset; cut <= int64(len(written)); cut++ {
		path := filepath.Join(t.TempDir(), "0.log")
		_, place := logOnce(t, path, before, data)
		if err := os.Truncate(path, place.offset+cut-at.offset); err != nil {
			t.Fatal(err)
		}
		log, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		payload, known, err := log.Resume(place.inode, place.offset, "stdout")
		if err != nil || !known {
			t.Fatalf("cut at %d: %d, %t, %v", cut, payload, known, err)
		}
		stream := log.Stream("stdout")
		_, _ = stream.Write([]byte((before + data)[payload:]))
		stream.Flush()
		if err := log.Close(); err != nil {
			t.Fatal(err)
		}
		if stdout, stderr := kubeletReads(t, path); stdout != "first\n"+before+data || stderr != "oops\n" {
			t.Errorf("cut at %d: %q, %q", cut, stdout, stderr)
		}
	}
}

// logOnce logs a line, another stream's, and then data behind the beginning of a
// line, and returns the log and where the entries of data begin.
func logOnce(t *testing.T, path, before, data string) ([]byte, noted) {
	t.Helper()
	log, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	var at noted
	stream := log.Stream("stdout")
	stream.Progress = func(inode uint64, offset int64) { at = noted{inode, offset} }
	_, _ = stream.Write([]byte("first\n" + before))
	_, _ = log.Stream("stderr").Write([]byte("oops\n"))
	_, _ = stream.Write([]byte(data))
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return content, at
}

// A log that is in another file by now tells nothing.
func TestResumeAfterRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	_, at := logOnce(t, path, "", "line\n")
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	log, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	if _, known, err := log.Resume(at.inode, at.offset, "stdout"); known || err != nil {
		t.Errorf("known %t, %v", known, err)
	}
}
