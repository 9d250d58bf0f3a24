package network

import (
	"errors"
	"testing"
)

// Who asks for a configuration where there was none need not wait for the
// next look: a kubelet starts pods as soon as the file is there.
func TestConfigurationLooksWhenThereWasNone(t *testing.T) {
	n := newNode(t, nil) // Run is not running
	if _, err := n.Configuration(); !errors.Is(err, ErrNoConfiguration) {
		t.Fatalf("got %v", err)
	}
	n.configure(t, "10.conflist", "there", n.script())
	if c, err := n.Configuration(); err != nil || c.Name != "there" {
		t.Errorf("got %v, %v", c, err)
	}
}
