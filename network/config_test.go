package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

const goodList = `{"cniVersion": "1.1.0", "name": "good", "plugins": [{"type": "bridge"}, {"type": "portmap"}]}`

// A file that cannot be used hides none that can, wherever it stands; of those the first by name
// counts, and what has another ending is none.
func TestReadDirectoryPassesOverBadFiles(t *testing.T) {
	for _, content := range []string{
		"", goodList[:40], "\x00\x01", "[]", "null", `{"cniVersion": "1.1.0", "plugins": [{"type": "bridge"}]}`,
		`{"cniVersion": "1.1.0", "name": "x", "plugins": []}`, `{"cniVersion": "1.1.0", "name": "x", "plugins": "bridge"}`,
		`{"cniVersion": "1.1.0", "name": "x", "plugins": [{"bridge": "b"}]}`,
		`{"cniVersion": "1.0.0", "name": "a/b", "plugins": [{"type": "bridge"}]}`, `{"cniVersion": "one", "name": "x", "plugins": [{"type": "bridge"}]}`,
		`{"cniVersion": "1.0.0", "name": "` + strings.Repeat("n", 186) + `", "plugins": [{"type": "bridge"}]}`,
	} {
		t.Run(content, func(t *testing.T) {
			directory := t.TempDir()
			put(t, filepath.Join(directory, "20-second.conflist"), conflist(t, "second", map[string]any{"type": "bridge"}))
			put(t, filepath.Join(directory, "10-good.conflist"), goodList)
			put(t, filepath.Join(directory, "00-edited.conflist~"), "half a")
			for _, bad := range []string{"00-bad.conflist", "20-bad.conflist", "01-bad.conf", "02-bad.json"} {
				put(t, filepath.Join(directory, bad), content)
			}
			must(t, os.Symlink("nowhere", filepath.Join(directory, "03-dangling.conflist")))
			got, problems := readFirst(directory)
			harness.Need(t, got != nil, "got %+v, %v", got, problems)
			harness.Want(t, got.Name == "good", "got %+v, %v", got, problems)
			harness.Want(t, filepath.Base(got.File) == "10-good.conflist", "got %+v, %v", got, problems)
			harness.Want(t, slices.Equal(got.Plugins, []string{"bridge", "portmap"}), "got %+v, %v", got, problems)
			harness.Want(t, len(problems) == 5, "%d problems, want one for each of the five: %v", len(problems), problems)
			for _, problem := range problems {
				harness.WantError(t, problem, directory)
			}
		})
	}
}

// What is no regular file is a problem, and is not waited for.
func TestReadDirectoryDoesNotWaitForFifos(t *testing.T) {
	directory := t.TempDir()
	put(t, filepath.Join(directory, "10-good.conflist"), goodList)
	put(t, filepath.Join(directory, "00-folder.conflist"), `{"cniVersion": "1.1.0", "name": "folder"}`)
	must(t, os.Mkdir(filepath.Join(directory, "folder"), 0o700))
	for _, fifo := range []string{"01-fifo.conflist", "02-fifo.conf", "folder/fifo.conf"} {
		must(t, unix.Mkfifo(filepath.Join(directory, fifo), 0o600))
	}
	must(t, os.Symlink("01-fifo.conflist", filepath.Join(directory, "03-link.json")))
	got, problems := readFirst(directory)
	harness.Want(t, got != nil && got.Name == "good", "got %+v, %v", got, problems)
	harness.Want(t, len(problems) == 4, "%d problems, want one for each of the four: %v", len(problems), problems)
	for _, problem := range problems {
		harness.WantError(t, problem, directory, "no regular file")
	}
}

// A list may take plugins from files beside it; what is kept stands alone, and has fields that are
// unknown here as they are.
func TestPluginsFromAFolderAreInlined(t *testing.T) {
	directory := t.TempDir()
	must(t, os.Mkdir(filepath.Join(directory, "split"), 0o700))
	put(t, filepath.Join(directory, "10-split.conflist"), `{"cniVersion": "1.1.0", "name": "split", "disableGC": true, "new": {"a": [1]},
		"plugins": [{"type": "bridge", "isGateway": true, "deep": {"number": 0.25}}]}`)
	put(t, filepath.Join(directory, "split", "10-tuning.conf"), `{"cniVersion": "1.1.0", "name": "split", "type": "tuning", "mtu": 1400}`)
	got, problems := readFirst(directory)
	harness.Need(t, len(problems) == 0 && got != nil, "%+v, %v", got, problems)
	harness.Need(t, slices.Equal(got.Plugins, []string{"bridge", "tuning"}), "%+v, %v", got, problems)
	var list map[string]json.RawMessage
	must(t, json.Unmarshal(got.Bytes, &list))
	for key, want := range map[string]string{
		"disableGC": "true", "new": `{"a":[1]}`, "loadOnlyInlinedPlugins": "true", // else it looks for its folder again
		"plugins": `[{"deep":{"number":0.25},"isGateway":true,"type":"bridge"},{"cniVersion":"1.1.0","name":"split","type":"tuning","mtu":1400}]`,
	} {
		harness.Want(t, string(list[key]) == want, "%s became %s", key, list[key])
	}
}

func TestMissingPlugins(t *testing.T) {
	list := func(ipam string, types ...string) *Configuration {
		c := &Configuration{Name: "x"}
		for _, name := range types {
			c.Bytes = fmt.Appendf(c.Bytes, `,{"type":%q,"ipam":{"type":%q}}`, name, ipam)
		}
		c.Bytes = fmt.Appendf(nil, `{"plugins":[%s]}`, c.Bytes[1:])
		return c
	}
	err := errors.Join(new(programs).unfit(list("beam", "bridge", "teleport", "warp"), []string{realPlugins}, true)...)
	harness.WantError(t, err, `network "x"`, "teleport", "warp", "ipam: ", "beam", realPlugins, "cni_bin_dir")
	dir := t.TempDir()
	put(t, filepath.Join(dir, "beam"), "no program")
	must(t, os.WriteFile(filepath.Join(dir, "warp"), nil, 0o755)) // as a power cut leaves it
	must(t, os.WriteFile(filepath.Join(dir, "shield"), []byte("of another machine"), 0o755))
	err = errors.Join(new(programs).unfit(list("beam", "bridge", "warp", "shield"), []string{dir, realPlugins}, true)...)
	harness.WantError(t, err, "ipam: ", filepath.Join(dir, "beam"), "not executable", filepath.Join(dir, "warp"), "is empty",
		"exec "+filepath.Join(dir, "shield"), "another architecture")
	errs := new(programs).unfit(list("beam", "bridge"), []string{"/nowhere", realPlugins}, false)
	harness.Want(t, len(errs) == 0, "%v", errs)
}

// readFirst is what a directory gives to the next pod.
func readFirst(directory string) (*Configuration, []error) {
	good, problems := readDirectory(directory, nil)
	if len(good) == 0 {
		return nil, problems
	}
	return good[0], problems
}

func bridged(o *Options) {
	o.Default = DefaultNetwork{Enabled: true, Masquerade: true, Name: "embedded", Bridge: "test-br0", DataDir: filepath.Join(o.Root, "addresses")}
}

// With another subnet the bridge is made anew when no pod is on it; while one is, the problem says which, and the
// network is not ready. An address of an administrator's is no subnet.
func TestAnotherSubnetMakesTheBridgeAnew(t *testing.T) {
	n := masqueraded(t, "test-br7", "10.97.0.0/24")
	n.runs(t)
	other := n.Options.Default
	other.Subnet = "10.98.0.0/24"
	n.attached(t, "web")
	n.SetDefault(other)
	n.Reload()
	_, err := n.Configuration()
	harness.WantError(t, err, "test-br7", "10.97.0.1/24", "earlier subnet", "web", "remove")
	n.detach(t, "web")
	_, err = n.Configuration()
	must(t, err)
	n.journalled(t, "db", nil)
	given := n.attach(t, "db").Addresses
	harness.Want(t, len(given) == 1 && netip.MustParsePrefix("10.98.0.0/24").Contains(given[0]), "addresses %v", given)
	link, err := netlink.LinkByName("test-br7")
	must(t, err)
	must(t, netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 98, 0, 200), Mask: net.CIDRMask(24, 32)}}))
	n.Options.Default.Subnet = "10.98.0.0/24"
	n.reopen(t)
	n.runs(t)
	_, err = n.Configuration()
	must(t, err)
	n.detach(t, "db")
	// Over a restart too, where the journal knows who is on it.
	n.attached(t, "web2")
	n.Options.Default.Subnet = "10.99.0.0/24"
	n.reopen(t)
	n.runs(t)
	_, err = n.Configuration()
	harness.WantError(t, err, "10.98.0.1/24", "web2")
	n.detach(t, "web2")
	harness.Eventually(t, "the network is there", func() bool { _, err := n.Configuration(); return err == nil })
}

// Of a bridge that has another name now none is left that has the gateway, too: the node would send there what is for pods.
func TestAnotherNameOfTheBridge(t *testing.T) {
	n := masqueraded(t, "minicri-t7", "10.97.0.0/24")
	n.runs(t)
	n.attached(t, "web")
	other := n.Options.Default
	other.Bridge = "test-br9"
	removeLinkAtEnd(t, other.Bridge)
	n.SetDefault(other)
	n.Reload()
	_, err := n.Configuration()
	harness.WantError(t, err, "minicri-t7", "10.97.0.1/24", "web", "test-br9")
	n.detach(t, "web")
	harness.Eventually(t, "the network is there", func() bool { _, err := n.Configuration(); return err == nil })
	n.attached(t, "db")
	_, err = netlink.LinkByName("minicri-t7")
	harness.WantError(t, err, "not found")
	n.detach(t, "db")
}

// Interfaces that come and go while they are listed keep nobody from finding the bridge.
func TestBridgesBesideInterfacesThatComeAndGo(t *testing.T) {
	link := func(name string) netlink.Link { return &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}} }
	for i := range 50 {
		stays := link(fmt.Sprint("stays", i))
		must(t, netlink.LinkAdd(stays))
		t.Cleanup(func() { must(t, netlink.LinkDel(stays)) })
	}
	over, ended := make(chan struct{}), make(chan error)
	go func() {
		var err error
		for goes := link("goes"); err == nil; {
			select {
			case <-over:
				ended <- nil
				return
			default:
				err = errors.Join(netlink.LinkAdd(goes), netlink.LinkDel(goes))
			}
		}
		ended <- err
	}()
	cut := 0
	for i := 0; i < 300 || cut == 0 && i < 10_000; i++ {
		bridges, err := DefaultNetwork{Bridge: "stays7"}.bridges()
		harness.Want(t, err == nil && len(bridges) == 1, "%v, %v", bridges, err)
		if _, err := netlink.LinkList(); errors.Is(err, netlink.ErrDumpInterrupted) {
			cut++
		}
	}
	close(over)
	harness.Check(t, <-ended)
	harness.Want(t, cut > 0, "the kernel has cut no list short: this shows nothing")
}
