package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

const (
	// Protocol is the version of the protocol that this build speaks.
	Protocol = 1
	// RecordVersion is that of the files in a supervisor's directory by which a
	// successor adopts its containers.
	RecordVersion = 1
)

// About is what a supervisor says of itself in its directory (AboutFile), also to those
// who do not know its protocol.
type About struct {
	Build    string `json:"build"`   // of the program, by its content
	Version  string `json:"version"` // of the daemon that started it
	Protocol uint32 `json:"protocol"`
	Records  uint32 `json:"records"`
}

// ReadAbout reads what the supervisor of a directory says of itself; nil if none has
// served there.
func ReadAbout(dir string) (*About, error) {
	content, err := os.ReadFile(filepath.Join(dir, AboutFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	about := new(About)
	if err == nil {
		err = json.Unmarshal(content, about)
	}
	if err != nil {
		return nil, fmt.Errorf("read which build serves %s: %w", dir, err)
	}
	return about, nil
}

// Write replaces the file as a whole, unless it says the same.
func (a About) Write(dir string) error {
	content, err := json.Marshal(a)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, AboutFile)
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, content) {
		return nil
	}
	if err := os.WriteFile(path+".new", content, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
