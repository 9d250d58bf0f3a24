package network

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// An address that host-local holds for a container that nobody has is freed by GC, also of a network before CNI 1.1. It
// stays if the container has an attachment, if another runtime's ADD has a result for it, or if it is new.
func TestLostAddresses(t *testing.T) {
	n := newNode(t, nil)
	chain := n.chain(t)[:1]
	text := marshal(t, map[string]any{"cniVersion": "1.0.0", "name": "net", "plugins": chain})
	put(t, filepath.Join(n.ConfDir, "10.conflist"), text)
	n.attached(t, "web")
	dir := filepath.Join(n.scripted, "ipam", "net")
	old := time.Now().Add(-time.Hour)
	for address, id := range map[string]string{
		"10.97.0.50": "lost", "10.97.0.51": "others", "10.97.0.52": "new", "fd00::5": "lost6",
	} {
		file := filepath.Join(dir, address)
		put(t, file, id+"\r\neth0")
		if id != "new" {
			must(t, os.Chtimes(file, old, old))
		}
	}
	must(t, os.Chtimes(filepath.Join(dir, n.given["web"][0].String()), old, old))
	others := CachePath("", "net", "others")
	must(t, os.MkdirAll(filepath.Dir(others), 0o700))
	put(t, others, "{}")
	configuration, err := n.Configuration()
	must(t, err)
	lost, err := LostAddresses(configuration.Bytes, "", func(id string) bool { return n.find(id) != nil })
	must(t, err)
	var found []string
	for _, a := range lost {
		found = append(found, a.ID)
	}
	harness.Same(t, "lost", strings.Join(found, " "), "lost new lost6")
	n.collect(t.Context(), configuration)
	for _, name := range []string{"10.97.0.50", "fd00::5"} {
		_, err := os.Lstat(filepath.Join(dir, name))
		harness.Want(t, os.IsNotExist(err), "%s is still held", name)
	}
	for _, name := range []string{"10.97.0.51", "10.97.0.52", n.given["web"][0].String()} {
		_, err := os.Lstat(filepath.Join(dir, name))
		harness.Want(t, err == nil, "%s was freed", name)
	}
	n.detach(t, "web")
}
