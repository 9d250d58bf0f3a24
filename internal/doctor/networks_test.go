package doctor

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/test/harness"
)

// list is a network without a plugin's program.
const list = `{"cniVersion": "1.0.0", "name": "net", "plugins": [
	{"type": "gone-plugin", "ipam": {"type": "host-local", "dataDir": "DIR/ipam"}}
]}`

// newChecker looks at a node of empty directories below dir.
func newChecker(t *testing.T) (c *checker, dir string) {
	dir = t.TempDir()
	settings := config.Default()
	for key, name := range map[*string]string{
		&settings.Root: "root", &settings.State: "state", &settings.NetnsDir: "netns",
		&settings.CNIConf: "net.d", &settings.CNIBin: "bin",
	} {
		*key = filepath.Join(dir, name)
		harness.Check(t, os.Mkdir(*key, 0o755))
	}
	own, err := node.Open(settings.Root, settings.State, settings.NetnsDir)
	harness.Check(t, err)
	return &checker{Options: Options{Config: settings, Node: own}}, dir
}

func (c *checker) attach(t *testing.T, dir string, ids ...string) {
	journal, err := state.Open[network.Attachment](c.attachmentDir(), 1, true)
	harness.Check(t, err)
	for _, id := range ids {
		harness.Check(t, journal.Put(id, network.Attachment{
			ID: id, Network: "net", Config: json.RawMessage(strings.ReplaceAll(list, "DIR", dir)),
			Releasing: true, Tries: 3, LastError: "no such plugin",
			Args: map[string]string{"K8S_POD_NAMESPACE": "shop", "K8S_POD_NAME": "pod-" + id},
		}))
	}
}

// One line stands for the attachments of a network and names their pods. --fix abandons them if the network was removed
// for good. No advice is to force.
func TestAttachmentsOfARemovedNetwork(t *testing.T) {
	for _, one := range []struct {
		name    string
		install func(t *testing.T, c *checker, dir string)
		fixed   bool
	}{
		{"removed for good", func(*testing.T, *checker, string) {}, true},
		{"configured", func(t *testing.T, c *checker, dir string) {
			text := strings.ReplaceAll(list, "DIR", dir)
			harness.Check(t, os.WriteFile(filepath.Join(c.Config.CNIConf, "10.conflist"), []byte(text), 0o600))
		}, false},
		{"its plugins exist", func(t *testing.T, c *checker, _ string) {
			harness.Check(t, os.WriteFile(filepath.Join(c.Config.CNIBin, "gone-plugin"), []byte("#!/bin/sh"), 0o755))
		}, false},
	} {
		t.Run(one.name, func(t *testing.T) {
			c, dir := newChecker(t)
			c.attach(t, dir, "a", "b")
			one.install(t, c, dir)
			c.attachments()
			harness.Need(t, len(c.findings) == 1, "findings: %+v", c.findings)
			found := c.findings[0]
			for _, text := range []string{`2 attachments on network "net"`, "shop/pod-a"} {
				harness.Want(t, strings.Contains(found.Message, text), "message: %s", found.Message)
			}
			harness.Want(t, !strings.Contains(found.Message+found.Advice, "force"), "advice: %s", found.Advice)
			fixed := Fix(c.findings, false, nil)
			harness.Same(t, "fixed", Clean(fixed), one.fixed)
			harness.Same(t, "entries are gone", !c.hasAttachment("a") && !c.hasAttachment("b"), one.fixed)
		})
	}
}

// An address that no pod has is a line of its own, and --fix frees it.
func TestLostAddress(t *testing.T) {
	c, dir := newChecker(t)
	c.attach(t, dir, "known")
	addresses := filepath.Join(dir, "ipam", "net")
	harness.Check(t, os.MkdirAll(addresses, 0o755))
	old := time.Now().Add(-time.Hour)
	for address, id := range map[string]string{"10.0.0.2": "known", "10.0.0.3": "lost"} {
		file := filepath.Join(addresses, address)
		harness.Check(t, os.WriteFile(file, []byte(id+"\neth0"), 0o600))
		harness.Check(t, os.Chtimes(file, old, old))
	}
	c.lostAddresses()
	harness.Need(t, len(c.findings) == 1, "findings: %+v", c.findings)
	message := c.findings[0].Message
	harness.Want(t, strings.Contains(message, `address 10.0.0.3 of network "net"`), "message: %s", message)
	fixed := Fix(c.findings, false, nil)
	harness.Want(t, Clean(fixed), "fixed: %+v", fixed)
	left := harness.Glob(t, addresses, "10.*")
	harness.Same(t, "addresses", left, []string{filepath.Join(addresses, "10.0.0.2")})
}

// The line of a broken file reports that the running daemon still uses the previous content.
func TestBrokenFileOfARunningNetwork(t *testing.T) {
	c, _ := newChecker(t)
	harness.Check(t, os.WriteFile(filepath.Join(c.Config.CNIConf, "10.conflist"), []byte("{\n\"name\": }"), 0o600))
	_, problems := network.Survey(c.Config.CNIConf, nil)
	harness.Need(t, len(problems) == 1, "problems: %v", problems)
	const previous = "; its previous content stays in use"
	c.Daemon = &Daemon{Networks: []string{problems[0].Error() + previous}}
	c.networks()
	harness.Need(t, len(c.findings) == 1, "findings: %+v", c.findings)
	message := c.findings[0].Message
	harness.Want(t, strings.Contains(message, "line 2") && strings.HasSuffix(message, previous), "message: %s", message)
}
