package network

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func (n *node) wantNetwork(t *testing.T, name string) {
	t.Helper()
	eventually(t, within, "the network is "+name+", and ready", func() bool {
		c, err := n.Configuration()
		return err == nil && c.Name == name && n.ready(t) == nil
	})
}

// The folder that a list takes plugins from is followed, too.
func TestNetworkFollowsAFolderOfPlugins(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "split", n.script())
	n.runs(t)
	n.wantNetwork(t, "split")
	folder := filepath.Join(n.ConfDir, "split")
	must(t, os.Mkdir(folder, 0o700))
	put(t, filepath.Join(folder, "10.conf"), `{"cniVersion": "1.1.0", "name": "split", "type": "tuning"}`)
	eventually(t, within, "the plugin of the folder is taken", func() bool {
		c, err := n.Configuration()
		return err == nil && len(c.Plugins) == 2
	})
}

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
