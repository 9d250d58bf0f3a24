package sweep_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/isolate"
)

// TestMain keeps the mounts that the tests make away from the machine.
func TestMain(m *testing.M) { os.Exit(isolate.Run(m, nil)) }

// What is mounted in an orphan is unmounted and not emptied, also where the state directory is reached by a
// symbolic link, as /var/run is on many machines; the namespace of an attachment that waits for its DEL is none.
func TestMountsOfAnOrphanAreNotEmptied(t *testing.T) {
	base, volume, orphan := t.TempDir(), t.TempDir(), strings.Repeat("cd", 32)
	root, state, netns := filepath.Join(base, "root"), filepath.Join(base, "state"), filepath.Join(base, "netns")
	file, mounted := filepath.Join(volume, "data"), filepath.Join(base, "run", "containers", orphan, "images", "0")
	harness.Check(t, errors.Join(os.MkdirAll(mounted, 0o700), os.Mkdir(root, 0o700), os.Symlink("run", state), os.WriteFile(file, []byte("precious"), 0o600)))
	harness.Check(t, unix.Mount(volume, mounted, "", unix.MS_BIND, ""))
	identity, err := node.Open(root, state, netns)
	harness.Check(t, err)
	harness.Check(t, os.MkdirAll(filepath.Join(netns, identity.Mark()+orphan), 0o700))
	p := sweep.Places{
		Node: identity, Root: root, State: state, Kill: time.Minute, Hierarchies: cgroup.Hierarchies{},
		Netns: namespace.Find(netns, identity.Mark()), Userns: namespace.Find(filepath.Join(state, "userns"), identity.Mark()),
	}
	nobody := func(string) bool { return false }
	found, err := p.Find(sweep.Owners{Pod: nobody, Container: nobody, Attached: func(id string) bool { return id == orphan }})
	harness.Check(t, err)
	harness.Need(t, len(found) == 1, "found %v", found)
	harness.Check(t, p.Remove(found[0]))
	_, err = os.Lstat(found[0].Path)
	harness.Want(t, errors.Is(err, os.ErrNotExist), "the directory is left: %v", err)
	content, err := os.ReadFile(file)
	harness.Want(t, err == nil && string(content) == "precious", "what was mounted is gone: %q, %v", content, err)
}
