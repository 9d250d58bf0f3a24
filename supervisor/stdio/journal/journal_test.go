package journal

import (
	"fmt"
	"path/filepath"
	"testing"
)

// A successor finds in each phase what is not in the log.
func TestLeft(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	old, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	moves := map[string]func(*Slot){
		"before the read": func(s *Slot) { s.Begin(3) },
		"after the read":  func(s *Slot) { copy(s.Begin(3), "abc") },
		"read":            func(s *Slot) { copy(s.Begin(3), "abc"); s.Have(3) },
		"writing":         func(s *Slot) { copy(s.Begin(3), "abc"); s.Have(3); s.Writing(7, 9) },
		"written":         func(s *Slot) { copy(s.Begin(3), "abc"); s.Have(3); s.Writing(7, 9); s.Written() },
		"idle":            func(s *Slot) { copy(s.Begin(3), "abc"); s.Have(3); s.Written(); s.Keep([]byte("li")) },
	}
	for owner, move := range moves {
		slot := old.Acquire(owner)
		slot.Keep([]byte("line"))
		move(slot)
	}
	old.Release(old.Acquire("released"))
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	j, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	for owner, want := range map[string]string{
		"before the read": "line,,false,false,0,0",
		"after the read":  "line,abc,false,false,0,0",
		"read":            "line,abc,false,false,0,0",
		"writing":         "line,abc,false,true,7,9",
		"written":         "line,abc,true,false,0,0",
		"idle":            "li,,false,false,0,0",
	} {
		slot := j.Take(owner)
		if slot == nil {
			t.Errorf("%s: nothing is left", owner)
			continue
		}
		left := slot.Left()
		if got := fmt.Sprintf("%s,%s,%t,%t,%d,%d", left.Line, left.Data, left.Logged, left.Begun, left.Inode, left.Offset); got != want {
			t.Errorf("%s: %s, want %s", owner, got, want)
		}
		j.Release(slot)
	}
	if j.Take("released") != nil || j.Take("read") != nil {
		t.Error("what was released is there, or what was taken is there twice")
	}
}

// Slots are used again, and there are as many as are held at a time.
func TestSlotsAreUsedAgain(t *testing.T) {
	j, err := Open(filepath.Join(t.TempDir(), "journal"))
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	for range 1000 {
		j.Release(j.Acquire("one"))
	}
	if j.size != segmentSize {
		t.Errorf("the journal has %d bytes, want %d", j.size, segmentSize)
	}
	var held []*Slot
	for i := range 3 * segmentSlots {
		held = append(held, j.Acquire(fmt.Sprint(i)))
	}
	for _, slot := range held {
		j.Release(slot)
	}
	if j.size != 3*segmentSize {
		t.Errorf("the journal has %d bytes, want %d", j.size, 3*segmentSize)
	}
}
