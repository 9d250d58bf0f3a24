package kubelet

import (
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// chattyLines is how many numbered lines the chatty container writes, over some
// seconds. Each takes about 45 bytes in the log, which the kubelet rotates at
// 100 KiB.
const chattyLines = 20000

func (k *kubelet) applyChatty() {
	const script = "i=0; while test $i -lt 100; do seq $((i * 200 + 1)) $((i * 200 + 200)); i=$((i + 1)); sleep 0.05; done"
	k.apply("chatty", containers(shell("app", script+forever)))
}

// checkRotation looks for lines that the rotations have lost or doubled.
func (k *kubelet) checkRotation() {
	var lines []string
	var files int
	eventually(k.t, "the last line is logged", func() bool {
		lines, files = k.chatter()
		return len(lines) > 0 && strings.HasSuffix(lines[len(lines)-1], fmt.Sprintf(" %d\n", chattyLines))
	})
	if files < 2 {
		k.t.Error("the log was never rotated")
	}
	for i, line := range lines {
		if !strings.HasSuffix(line, fmt.Sprintf(" stdout F %d\n", i+1)) {
			k.t.Fatalf("line %d of %d is %q", i+1, len(lines), line)
		}
	}
}

// chatter reads all logs of the chatty container, the oldest first. It reads
// none when the kubelet, which renames and compresses them, comes between.
func (k *kubelet) chatter() (lines []string, files int) {
	names, err := filepath.Glob(filepath.Join(k.path("logs"), "default_chatty-*", "app", "0.log*"))
	check(k.t, err)
	if len(names) == 0 {
		return nil, 0
	}
	// The names of rotated ones end with their time; the present one is the first.
	slices.Sort(names)
	for _, name := range append(names[1:], names[0]) {
		text, err := readLog(name)
		if err != nil {
			return nil, 0
		}
		lines = slices.AppendSeq(lines, strings.Lines(text))
	}
	return lines, len(names)
}

// readLog reads a log that the kubelet may have compressed.
func readLog(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	var r io.Reader = f
	if strings.HasSuffix(file, ".gz") {
		if r, err = gzip.NewReader(f); err != nil {
			return "", err
		}
	}
	data, err := io.ReadAll(r)
	return string(data), err
}
