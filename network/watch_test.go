package network

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func (n *node) wantNetwork(t *testing.T, name string) {
	t.Helper()
	eventually(t, within, "the network is "+name+", and ready", func() bool {
		c, err := n.Configuration()
		return err == nil && c.Name == name && n.ready(t) == nil
	})
}

func (n *node) wantNotReady(t *testing.T) {
	t.Helper()
	eventually(t, within, "the network is not ready", func() bool { return n.ready(t) != nil })
}

// A node's network follows whatever is done to its directory.
func TestNetworkFollowsItsDirectory(t *testing.T) {
	n := newNode(t, func(o *Options) { o.Limits.Reload = time.Second })
	n.runs(t)
	wantError(t, n.ready(t), n.ConfDir, "default_network.enabled")
	if !errors.Is(n.ready(t), ErrNoConfiguration) {
		t.Errorf("%v is not ErrNoConfiguration", n.ready(t))
	}

	n.configure(t, "10.conflist", "first", n.script())
	n.wantNetwork(t, "first")

	t.Log("a file is renamed in, before the first")
	next := filepath.Join(t.TempDir(), "next")
	put(t, next, conflist(t, "renamed", n.script()))
	if err := os.Rename(next, filepath.Join(n.ConfDir, "05.conflist")); err != nil {
		t.Fatal(err)
	}
	n.wantNetwork(t, "renamed")

	t.Log("a bad one comes before both, and half a one")
	put(t, filepath.Join(n.ConfDir, "00.conflist"), "bad")
	eventually(t, within, "the bad file is a problem", func() bool { return len(n.Problems()) == 1 })
	n.wantNetwork(t, "renamed")

	t.Log("the directory is removed")
	if err := os.RemoveAll(n.ConfDir); err != nil {
		t.Fatal(err)
	}
	n.wantNotReady(t)

	t.Log("the directory is made again")
	if err := os.Mkdir(n.ConfDir, 0o700); err != nil {
		t.Fatal(err)
	}
	n.configure(t, "10.conflist", "remade", n.script())
	n.wantNetwork(t, "remade")
}

// A ConfigMap is a directory of links through one link that is switched.
func TestNetworkFollowsASwitchedLink(t *testing.T) {
	n := newNode(t, nil)
	for _, version := range []string{"v1", "v2"} {
		if err := os.Mkdir(filepath.Join(n.ConfDir, ".."+version), 0o700); err != nil {
			t.Fatal(err)
		}
		n.configure(t, "../"+filepath.Base(n.ConfDir)+"/.."+version+"/10.conflist", version, n.script())
	}
	link(t, "..v1", filepath.Join(n.ConfDir, "..data"))
	link(t, "..data/10.conflist", filepath.Join(n.ConfDir, "10.conflist"))
	n.runs(t)
	n.wantNetwork(t, "v1")
	link(t, "..v2", filepath.Join(n.ConfDir, "..data_tmp"))
	if err := os.Rename(filepath.Join(n.ConfDir, "..data_tmp"), filepath.Join(n.ConfDir, "..data")); err != nil {
		t.Fatal(err)
	}
	n.wantNetwork(t, "v2")
}

func link(t *testing.T, to, path string) {
	t.Helper()
	if err := os.Symlink(to, path); err != nil {
		t.Fatal(err)
	}
}

// The folder that a list takes plugins from is followed, too.
func TestNetworkFollowsAFolderOfPlugins(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "split", n.script())
	n.runs(t)
	n.wantNetwork(t, "split")
	folder := filepath.Join(n.ConfDir, "split")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
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

// A snapshot is read while it is replaced, many times.
func TestReadersNeverWaitForChanges(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "net", n.script())
	n.Reload()
	stop := make(chan struct{})
	defer close(stop)
	for range 4 {
		go func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if c, err := n.Configuration(); err != nil || c.Name != "net" {
					t.Errorf("got %v, %v", c, err)
					return
				}
			}
		}()
	}
	for i := range 100 {
		next := filepath.Join(t.TempDir(), "next")
		put(t, next, conflist(t, "net", n.script(), map[string]any{"type": "tuning", "mtu": 1000 + i}))
		if err := os.Rename(next, filepath.Join(n.ConfDir, "10.conflist")); err != nil {
			t.Fatal(err)
		}
		n.Reload()
		c, err := n.Configuration()
		if err != nil || fmt.Sprint(pluginsOf(t, c)[1]["mtu"]) != fmt.Sprint(1000+i) {
			t.Fatalf("change %d: %v, %v", i, c, err)
		}
	}
}

// A file that is in use and is half written now keeps what it said: the next pod does not land on another network. One that is
// removed does not.
func TestHalfWrittenFileKeepsItsNetwork(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "cluster", n.script())
	n.configure(t, "87.conflist", "podman", n.script())
	n.runs(t)
	n.wantNetwork(t, "cluster")
	good, err := os.ReadFile(filepath.Join(n.ConfDir, "10.conflist"))
	must(t, err)
	for _, half := range []string{"", string(good[:len(good)/2])} {
		put(t, filepath.Join(n.ConfDir, "10.conflist"), half)
		eventually(t, within, "the broken file is shown", func() bool { return len(n.Problems()) == 1 })
		n.wantNetwork(t, "cluster")
		wantError(t, errors.Join(n.Problems()...), "10.conflist", "stays in use")
	}
	n.configure(t, "10.conflist", "mended", n.script())
	n.wantNetwork(t, "mended")
	must(t, os.Remove(filepath.Join(n.ConfDir, "10.conflist")))
	n.wantNetwork(t, "podman")
}
