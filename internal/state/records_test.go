package state

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// pod is a record as an earlier schema might have it.
type pod struct {
	Name  string   `json:"name"`
	Ports []int    `json:"ports,omitempty"`
	Inner struct{} `json:"inner"`
}

func openRecords(t *testing.T, durable bool) *Records[pod] {
	t.Helper()
	records, err := Open[pod](filepath.Join(t.TempDir(), "pods"), 2, durable)
	must(t, err)
	return records
}

func TestWriteLoadRemove(t *testing.T) {
	for _, durable := range []bool{false, true} {
		records := openRecords(t, durable)
		for _, write := range []pod{{Name: "old", Ports: []int{1}}, {Name: "new"}} {
			must(t, records.Write("a", write))
		}
		must(t, records.Write("b", pod{Name: "b", Ports: []int{80, 443}}))
		for path, want := range map[string]fs.FileMode{records.directory: 0o700, records.Path("a"): 0o600} {
			if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
				t.Errorf("%s: %v, %v, want the mode %v", path, info, err, want)
			}
		}
		loaded := load(t, records)
		if len(loaded) != 2 || loaded["a"].Name != "new" || loaded["a"].Ports != nil || !slices.Equal(loaded["b"].Ports, []int{80, 443}) {
			t.Errorf("durable %v: loaded %v", durable, loaded)
		}
		for range 2 { // the second time there is nothing to remove
			must(t, records.Remove("a"))
		}
		if loaded := load(t, records); len(loaded) != 1 || loaded["b"].Name != "b" {
			t.Errorf("durable %v: after Remove: %v", durable, loaded)
		}
		if names := list(t, records); !slices.Equal(names, []string{"b.json"}) {
			t.Errorf("durable %v: files %q", durable, names)
		}
	}
}

func TestQuarantineReplacesAnEarlierOne(t *testing.T) {
	records := openRecords(t, false)
	for _, content := range []string{"first", "second"} {
		put(t, records.Path("a"), content)
		bad := records.Quarantine("a", errors.New("no good"))
		if got := read(t, bad.Path); got != content {
			t.Errorf("set aside %q, want %q", got, content)
		}
	}
	if got := records.Quarantined(); len(got) != 1 {
		t.Errorf("Quarantined %q, want one", got)
	}
}

// A record that cannot even be moved stays where it is, and Load continues.
func TestQuarantineThatFails(t *testing.T) {
	records := openRecords(t, false)
	put(t, filepath.Join(records.directory, quarantine), "in the way")
	put(t, records.Path("bad"), "garbage")
	must(t, records.Write("good", pod{Name: "good"}))
	loaded, bad, err := records.Load()
	if err != nil || len(loaded) != 1 || len(bad) != 1 {
		t.Fatalf("loaded %v, bad %v, err %v", loaded, bad, err)
	}
	if bad[0].Path != records.Path("bad") || !strings.Contains(bad[0].Reason.Error(), "not a directory") {
		t.Errorf("%+v: want the record in its place, and why", bad[0])
	}
	if read(t, records.Path("bad")) != "garbage" {
		t.Error("the record has been changed")
	}
}

// What is no record stays, and what a write left that was cut off goes.
func TestLoadPassesOverWhatIsNoRecord(t *testing.T) {
	records := openRecords(t, false)
	must(t, records.Write("a", pod{Name: "a"}))
	put(t, filepath.Join(records.directory, "README"), "not ours")
	put(t, filepath.Join(records.directory, temporaryPrefix+"a.json-123"), `{"version": 2, "rec`)
	must(t, os.Mkdir(filepath.Join(records.directory, "dir"), 0o700))
	if loaded := load(t, records); len(loaded) != 1 || loaded["a"].Name != "a" {
		t.Errorf("loaded %v", loaded)
	}
	if names := list(t, records); !slices.Equal(names, []string{"README", "a.json", "dir"}) {
		t.Errorf("left %q", names)
	}
}

// A write that fails says so, leaves the old file and nothing beside it.
func TestWriteThatFails(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	must(t, os.MkdirAll(filepath.Join(path, "in the way"), 0o700))
	if err := WriteFile(path, []byte("new"), true); err == nil {
		t.Error("a file was renamed over a directory that is not empty")
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left %v, %v", entries, err)
	}
	if err := WriteFile(filepath.Join(dir, "missing", "file"), nil, false); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("into a directory that is not there: %v", err)
	}
	records := openRecords(t, false)
	must(t, os.RemoveAll(records.directory))
	if err := records.Write("a", pod{}); err == nil || !strings.Contains(err.Error(), "record of a") {
		t.Errorf("Write = %v, want an error that names the record", err)
	}
	if _, _, err := records.Load(); err == nil {
		t.Error("Load of a directory that is not there succeeds")
	}
}

func load(t *testing.T, records *Records[pod]) map[string]pod {
	t.Helper()
	loaded, bad, err := records.Load()
	if err != nil || len(bad) > 0 {
		t.Fatalf("Load: bad %v, err %v", bad, err)
	}
	return loaded
}

func list(t *testing.T, records *Records[pod]) []string {
	t.Helper()
	entries, err := os.ReadDir(records.directory)
	must(t, err)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func put(t *testing.T, path, content string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(content), 0o600))
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	must(t, err)
	return string(data)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A record that another process has removed is not written again.
func TestUpdateBesideItsRemoval(t *testing.T) {
	records := openRecords(t, true)
	if err := records.Update("a", pod{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an update of no record: %v", err)
	}
	must(t, records.Write("a", pod{Name: "old"}))
	must(t, records.Update("a", pod{Name: "new"}))
	if loaded := load(t, records); loaded["a"].Name != "new" {
		t.Errorf("loaded %v", loaded)
	}
}
