package crilog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/cri-client/pkg/logs"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/test/harness"
)

// kubeletReads gives back what the kubelet's reader makes of a log.
func kubeletReads(t *testing.T, path string) (stdout, stderr string) {
	var out, errs bytes.Buffer
	harness.Check(t, logs.ReadLogs(context.Background(), path, "", &logs.LogOptions{}, nil, &out, &errs))
	return out.String(), errs.String()
}

func TestKubeletReadsWhatWasWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	log, err := Open(path)
	harness.Check(t, err)
	var text strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&text, "%d %s\n", i, strings.Repeat("x", rand.IntN(5)*rand.IntN(9000)))
	}
	for _, n := range []int{MaxLine - 1, MaxLine, MaxLine + 1, 2 * MaxLine, 2*MaxLine + 1, 0} {
		text.WriteString(strings.Repeat("y", n) + "\n")
	}
	text.WriteString("no newline at the end")
	writeInPieces(log.Stream("stdout"), text.String())
	writeInPieces(log.Stream("stderr"), "oops\n")
	harness.Check(t, log.Close())

	stdout, stderr := kubeletReads(t, path)
	want := text.String()
	harness.Want(t, stdout == want, "stdout differs: %d bytes, want %d", len(stdout), len(want))
	harness.Same(t, "stderr", stderr, "oops\n") // with the newline that was written, and no other
	for _, line := range readLines(t, path) {
		fields := strings.SplitN(line, " ", 4)
		harness.Want(t, len(fields) == 4 && len(fields[3]) <= MaxLine, "entry %.80q is not in the format or longer than %d", line, MaxLine)
	}
}

// Before the guard the owner of the node may have links; behind it none is followed, and no path leads out.
func TestGuardedPath(t *testing.T) {
	dir := t.TempDir()
	harness.Check(t, errors.Join(os.MkdirAll(dir+"/real/pod", 0o755), os.Symlink("real", dir+"/logs"), os.Symlink("pod", dir+"/real/link")))
	log, err := Open(api.GuardedPath(dir+"/logs", "pod/0.log"))
	harness.Check(t, errors.Join(err, log.Close()))
	_, err = os.Stat(dir + "/real/pod/0.log")
	harness.Want(t, err == nil, "%v", err)
	for path, says := range harness.Sorted(map[string]string{"link/0.log": "symbolic link", "../real/pod/0.log": ""}) {
		_, err := Open(api.GuardedPath(dir+"/logs", path))
		harness.WantError(t, err, says)
		harness.Want(t, says == "" || errors.Is(err, unix.ELOOP), "%s: %v", path, err)
	}
}

func writeInPieces(s *Stream, text string) {
	for len(text) > 0 {
		n := min(1+rand.IntN(40_000), len(text))
		_, _ = s.Write([]byte(text[:n]))
		text = text[n:]
	}
	s.Flush()
}

func readLines(t *testing.T, path string) []string {
	content := harness.Read(t, path)
	if len(content) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(content), "\n"), "\n")
}

// noted keeps where entries were about to be written.
type noted struct {
	inode  uint64
	offset int64
}

// What a write that was cut off at any byte has brought to the log is told by
// the log itself, and its successor writes the rest. A log that is in another file by now tells nothing.
func TestResume(t *testing.T) {
	const before, data = "the begin", "ning\nwhole\nlast with no end"
	reference := filepath.Join(t.TempDir(), "0.log")
	written, at := logOnce(t, reference, before, data)
	for cut := at.offset; cut <= int64(len(written)); cut++ {
		path := filepath.Join(t.TempDir(), "0.log")
		_, place := logOnce(t, path, before, data)
		harness.Check(t, os.Truncate(path, place.offset+cut-at.offset))
		log, err := Open(path)
		harness.Check(t, err)
		payload, known, err := log.Resume(place.inode, place.offset, "stdout")
		harness.Want(t, err == nil && known, "cut at %d: %d, %t, %v", cut, payload, known, err)
		stream := log.Stream("stdout")
		_, _ = stream.Write([]byte((before + data)[payload:]))
		stream.Flush()
		harness.Check(t, log.Close())
		stdout, stderr := kubeletReads(t, path)
		harness.Want(t, stdout == "first\n"+before+data && stderr == "oops\n", "cut at %d: %q, %q", cut, stdout, stderr)
	}
	harness.Check(t, os.Rename(reference, reference+".1"))
	log, err := Open(reference)
	harness.Check(t, err)
	defer log.Close()
	_, known, err := log.Resume(at.inode, at.offset, "stdout")
	harness.Want(t, !known && err == nil, "in another file: known %t, %v", known, err)
}

// logOnce logs a line, another stream's, and then data behind the beginning of a
// line, and returns the log and where the entries of data begin.
func logOnce(t *testing.T, path, before, data string) ([]byte, noted) {
	log, err := Open(path)
	harness.Check(t, err)
	var at noted
	stream := log.Stream("stdout")
	stream.Progress = func(inode uint64, offset int64) { at = noted{inode, offset} }
	_, _ = stream.Write([]byte("first\n" + before))
	_, _ = log.Stream("stderr").Write([]byte("oops\n"))
	_, _ = stream.Write([]byte(data))
	harness.Check(t, log.Close())
	content := harness.Read(t, path)
	return content, at
}
