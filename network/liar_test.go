package network

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// newLiar makes a node with a plugin that answers ADD with what a file has, and succeeds, whatever that is.
func newLiar(t *testing.T) (n *node, answer string) {
	bin := t.TempDir()
	answer = filepath.Join(bin, "answer")
	script := fmt.Sprintf("#!/bin/sh\ncat >/dev/null\n[ $CNI_COMMAND != ADD ] || cat %s\n", answer)
	must(t, os.WriteFile(filepath.Join(bin, "liar"), []byte(script), 0o755))
	n = newNode(t, func(o *Options) { o.BinDirs = append(o.BinDirs, bin) })
	n.configure(t, "10.conflist", "net", map[string]any{"type": "liar"})
	return n, answer
}

// Whatever a plugin prints, the daemon lives, the error names the plugin and says what to do, and DEL comes after
// it: go-cni and libcni trust what they decode, and panic at some of it.
func TestAnswersThatAreNoResult(t *testing.T) {
	n, answer := newLiar(t)
	ids := 0
	try := func(text string) (*Result, error) {
		put(t, answer, text)
		ids++
		id := fmt.Sprint("web-", ids)
		n.journalled(t, id, nil)
		defer n.detach(t, id)
		return n.Attach(t.Context(), id, n.Options.Namespaces.Path(id))
	}
	for name, text := range map[string]string{
		"an interface that is none":            `{"cniVersion":"1.1.0","interfaces":[null],"ips":[{"address":"10.0.0.2/24"}]}`,
		"an address of no interface":           `{"cniVersion":"1.1.0","ips":[{"address":"10.0.0.2/24","interface":0}]}`,
		"an address of a negative interface":   `{"cniVersion":"1.1.0","interfaces":[{"name":"eth0"}],"ips":[{"address":"10.0.0.2/24","interface":-1}]}`,
		"an address of one too many":           `{"cniVersion":"1.1.0","interfaces":[{"name":"eth0"}],"ips":[{"address":"10.0.0.2/24","interface":1}]}`,
		"an address that is none":              `{"cniVersion":"1.1.0","ips":[null]}`,
		"an older interface that is none":      `{"cniVersion":"0.4.0","interfaces":[null],"ips":[{"version":"4","address":"10.0.0.2/24"}]}`,
		"an older address that is none":        `{"cniVersion":"0.4.0","interfaces":[{"name":"eth0"}],"ips":[null]}`,
		"a very old answer with nothing":       `{"cniVersion":"0.2.0","ip4":null,"ip6":{"ip":"x"}}`,
		"a version that there is not":          `{"cniVersion":"9.9.9","ips":[{"address":"10.0.0.2/24"}]}`,
		"an address that cannot be read":       `{"cniVersion":"1.1.0","ips":[{"address":"10.0.0.999/24"}]}`,
		"a list":                               `[{"cniVersion":"1.1.0"}]`,
		"nothing at all":                       ``,
		"no object":                            `null`,
		"half of one":                          `{"cniVersion":"1.1.0","ips":[{"addr`,
		"bytes":                                "\x00\xff\x00{}",
		"an error with the code of success":    `{"cniVersion":"1.1.0","code":11,"msg":"try again"}`,
		"a very deep one":                      strings.Repeat(`{"a":`, 20000) + "1" + strings.Repeat("}", 20000),
		"an address without an interface name": `{"cniVersion":"1.1.0","interfaces":[{"name":"other"}],"ips":[{"address":"10.0.0.2/24","interface":0}]}`,
	} {
		result, err := try(text)
		harness.Want(t, err != nil || len(result.Addresses)+strings.Count(text, "msg") == 0, "%s: it is taken for %+v", name, result)
		if err != nil {
			harness.WantError(t, err, "plugin liar", "CNI ADD")
			harness.Want(t, !strings.Contains(text, "try again") || strings.Contains(err.Error(), "liar: try again (CNI error code 11)"), "%v", err)
			harness.Want(t, !strings.Contains(err.Error(), "goroutine") && len(err.Error()) <= 1000,
				"%s: the error has %d bytes: %.300v", name, len(err.Error()), err)
		}
	}
	// What is unusual and can be used is used.
	for name, text := range map[string]string{
		"two interfaces of one name":  `{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":"/x"},{"name":"eth0"}],"ips":[{"address":"192.0.2.7/24","interface":1}]}`,
		"an older route that is none": `{"cniVersion":"0.4.0","routes":[null],"ips":[{"version":"4","address":"192.0.2.7/24"}]}`,
		"no interfaces":               `{"cniVersion":"1.1.0","ips":[{"address":"192.0.2.7/24"}],"routes":null,"dns":null}`,
		"the other family named":      `{"cniVersion":"0.4.0","ips":[{"version":"6","address":"192.0.2.7/24"}]}`,
	} {
		result, err := try(text)
		harness.Want(t, err == nil && fmt.Sprint(result.Addresses) == "[192.0.2.7]", "%s: %+v, %v", name, result, err)
	}
}
