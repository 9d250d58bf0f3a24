package state

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// writerDirectory makes the test binary write records without end.
const writerDirectory = "STATE_TEST_WRITER_DIRECTORY"

func TestMain(m *testing.M) {
	if directory := os.Getenv(writerDirectory); directory != "" {
		fmt.Fprintln(os.Stderr, writeForEver(directory))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// counted tells by itself whether it is whole.
type counted struct {
	Number int    `json:"number"`
	Text   string `json:"text"`
}

func newCounted(number int) counted {
	return counted{number, strings.Repeat(strconv.Itoa(number)+" ", 20_000)}
}

func openCounted(directory string) (*Records[counted], counted, error) {
	records, err := Open[counted](directory, 1, true)
	if err != nil {
		return nil, counted{}, err
	}
	loaded, bad, err := records.Load()
	if err == nil && len(bad) > 0 {
		err = bad[0].Reason
	}
	return records, loaded["a"], err
}

// writeForEver counts on, in the record, and prints each number when its
// write has returned.
func writeForEver(directory string) error {
	records, last, err := openCounted(directory)
	for number := last.Number + 1; err == nil; number++ {
		if err = records.Write("a", newCounted(number)); err == nil {
			_, err = fmt.Println(number)
		}
	}
	return err
}

// A writer is killed 50 times at a random moment. What is found each time is
// one whole record: the last that was reported as written, or the one after it.
func TestKilledWriterLeavesTheOldOrTheNewRecord(t *testing.T) {
	directory := t.TempDir()
	cutOff := 0
	for range 50 {
		reported := killWriter(t, directory)
		entries, err := os.ReadDir(directory)
		must(t, err)
		cutOff += len(entries) - 1
		_, found, err := openCounted(directory)
		if err != nil {
			t.Fatalf("after a kill: %v", err)
		}
		if found != newCounted(found.Number) {
			t.Fatalf("record %d is not whole", found.Number)
		}
		if found.Number != reported && found.Number != reported+1 {
			t.Fatalf("found record %d, the writer was killed after %d", found.Number, reported)
		}
	}
	if cutOff == 0 {
		t.Error("no kill came in the middle of a write: the test shows nothing")
	}
}

// killWriter starts a writer, kills it, and returns the last number that it
// reported.
func killWriter(t *testing.T, directory string) int {
	t.Helper()
	command := exec.Command("/proc/self/exe")
	command.Env = append(os.Environ(), writerDirectory+"="+directory)
	command.Stderr = os.Stderr
	output, err := command.StdoutPipe()
	if err == nil {
		err = command.Start()
	}
	must(t, err)
	lines := bufio.NewScanner(output)
	last := 0
	for lines.Scan() {
		if last == 0 {
			time.AfterFunc(rand.N(20*time.Millisecond), func() { _ = command.Process.Kill() })
		}
		if last, err = strconv.Atoi(lines.Text()); err != nil {
			t.Fatal(err)
		}
	}
	if err := command.Wait(); err == nil || last == 0 {
		t.Fatalf("the writer ended by itself after record %d: %v", last, err)
	}
	return last
}
