package state_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/test/harness"
)

// pod is a record as an earlier schema might have it.
type pod struct {
	Name  string   `json:"name"`
	Ports []int    `json:"ports,omitempty"`
	Inner struct{} `json:"inner"`
}

func openRecords(t *testing.T, durable bool) *state.Records[pod] {
	records, err := state.Open[pod](filepath.Join(t.TempDir(), "pods"), 2, durable)
	harness.Check(t, err)
	return records
}

func directory(records *state.Records[pod]) string { return filepath.Dir(records.Path("a")) }

func TestWriteLoadRemove(t *testing.T) {
	for _, durable := range []bool{false, true} {
		records := openRecords(t, durable)
		for _, write := range []pod{{Name: "old", Ports: []int{1}}, {Name: "new"}} {
			harness.Check(t, records.Write("a", write))
		}
		harness.Check(t, records.Write("b", pod{Name: "b", Ports: []int{80, 443}}))
		for path, want := range map[string]fs.FileMode{directory(records): 0o700, records.Path("a"): 0o600} {
			info, err := os.Stat(path)
			harness.Want(t, err == nil && info.Mode().Perm() == want, "%s: %v, %v, want the mode %v", path, info, err, want)
		}
		loaded := load(t, records)
		harness.Need(t, len(loaded) == 2, "durable %v: loaded %v", durable, loaded)
		harness.Want(t, loaded["a"].Name == "new", "durable %v: loaded %v", durable, loaded)
		harness.Want(t, loaded["a"].Ports == nil, "durable %v: loaded %v", durable, loaded)
		harness.Want(t, slices.Equal(loaded["b"].Ports, []int{80, 443}), "durable %v: loaded %v", durable, loaded)
		for range 2 { // the second time there is nothing to remove
			harness.Check(t, records.Remove("a"))
		}
		loaded = load(t, records)
		harness.Want(t, len(loaded) == 1 && loaded["b"].Name == "b", "durable %v: after Remove: %v", durable, loaded)
		harness.Same(t, "files", list(t, records), []string{"b.json"})
	}
}

func TestQuarantineReplacesAnEarlierOne(t *testing.T) {
	records := openRecords(t, false)
	for _, content := range []string{"first", "second"} {
		put(t, records.Path("a"), content)
		bad := records.Quarantine("a", errors.New("no good"))
		harness.Same(t, "set aside", string(harness.Read(t, bad.Path)), content)
	}
	harness.Same(t, "records that are set aside", len(records.Quarantined()), 1)
}

// A record that cannot even be moved stays where it is, and Load continues.
func TestQuarantineThatFails(t *testing.T) {
	records := openRecords(t, false)
	put(t, filepath.Join(directory(records), "quarantine"), "in the way")
	put(t, records.Path("bad"), "garbage")
	harness.Check(t, records.Write("good", pod{Name: "good"}))
	loaded, bad, err := records.Load()
	harness.Need(t, err == nil && len(loaded) == 1,
		"loaded %v, bad %+v: want the record in its place, and why: %v", loaded, bad, err)
	harness.Need(t, len(bad) == 1, "loaded %v, bad %+v: want the record in its place, and why: %v", loaded, bad, err)
	harness.Want(t, bad[0].Path == records.Path("bad"),
		"loaded %v, bad %+v: want the record in its place, and why: %v", loaded, bad, err)
	harness.Want(t, strings.Contains(bad[0].Reason.Error(), "not a directory"),
		"loaded %v, bad %+v: want the record in its place, and why: %v", loaded, bad, err)
	harness.Same(t, "the record", string(harness.Read(t, records.Path("bad"))), "garbage")
}

// What is no record stays, and what a write left that was cut off goes.
func TestLoadPassesOverWhatIsNoRecord(t *testing.T) {
	records := openRecords(t, false)
	harness.Check(t, records.Write("a", pod{Name: "a"}))
	put(t, filepath.Join(directory(records), "README"), "not ours")
	put(t, filepath.Join(directory(records), ".new-a.json-123"), `{"version": 2, "rec`)
	harness.Check(t, os.Mkdir(filepath.Join(directory(records), "dir"), 0o700))
	loaded := load(t, records)
	harness.Want(t, len(loaded) == 1 && loaded["a"].Name == "a", "loaded %v", loaded)
	harness.Same(t, "left", list(t, records), []string{"README", "a.json", "dir"})
}

// A write that fails says so, leaves the old file and nothing beside it.
func TestWriteThatFails(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	harness.Check(t, os.MkdirAll(filepath.Join(path, "in the way"), 0o700))
	harness.Want(t, state.WriteFile(path, []byte("new"), true) != nil, "a file was renamed over a directory that is not empty")
	entries, err := os.ReadDir(dir)
	harness.Want(t, err == nil && len(entries) == 1, "left %v, %v", entries, err)
	err = state.WriteFile(filepath.Join(dir, "missing", "file"), nil, false)
	harness.Want(t, errors.Is(err, fs.ErrNotExist), "into a directory that is not there: %v", err)
	records := openRecords(t, false)
	harness.Check(t, os.RemoveAll(directory(records)))
	harness.WantError(t, records.Write("a", pod{}), "record of a")
	_, _, err = records.Load()
	harness.Want(t, err != nil, "Load of a directory that is not there succeeds")
}

func load(t *testing.T, records *state.Records[pod]) map[string]pod {
	loaded, bad, err := records.Load()
	harness.Want(t, err == nil && len(bad) == 0, "Load: bad %v, err %v", bad, err)
	return loaded
}

func list(t *testing.T, records *state.Records[pod]) []string {
	entries, err := os.ReadDir(directory(records))
	harness.Check(t, err)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func put(t *testing.T, path, content string) {
	harness.Check(t, os.WriteFile(path, []byte(content), 0o600))
}

// A record that another process has removed is not written again.
func TestUpdateBesideItsRemoval(t *testing.T) {
	records := openRecords(t, true)
	err := records.Update("a", pod{})
	harness.Want(t, errors.Is(err, fs.ErrNotExist), "an update of no record: %v", err)
	harness.Check(t, errors.Join(records.Write("a", pod{Name: "old"}), records.Update("a", pod{Name: "new"})))
	harness.Same(t, "what is loaded", load(t, records)["a"].Name, "new")
	for i := range 100 {
		updated := make(chan error, 1)
		go func() { updated <- records.Update("a", pod{}) }()
		time.Sleep(time.Duration(i) * 20 * time.Microsecond) // the removal is before, in and after the update
		harness.Check(t, os.Remove(records.Path("a")))
		err := <-updated
		harness.Need(t, len(load(t, records)) == 0, "it is there after its removal, and the update says %v", err)
		harness.Check(t, records.Write("a", pod{}))
	}
}
