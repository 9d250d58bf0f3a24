package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// processesWith lists the processes, but ourselves, that have a variable in their environment and have not ended.
func processesWith(t *testing.T, variables ...string) (found []string) {
	entries, err := os.ReadDir("/proc")
	must(t, err)
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		environment, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "environ"))
		if err != nil {
			continue // it has ended
		}
		all := true
		for _, variable := range variables {
			all = all && slices.Contains(strings.Split(string(environment), "\x00"), variable)
		}
		if all {
			command, _ := os.ReadFile(filepath.Join("/proc", entry.Name(), "cmdline"))
			found = append(found, fmt.Sprintf("%d %s", pid, bytes.ReplaceAll(command, []byte{0}, []byte{' '})))
		}
	}
	return found
}

func hangs(t *testing.T, id string) bool {
	found := processesWith(t, "CNI_CONTAINERID="+id)
	return len(found) >= 4 && strings.Contains(strings.Join(found, "\n"), "stuck-ipam")
}

// A plugin that hangs is ended at its limit with all that it started, however little that listens to signals. The one
// before it in the chain gets its DEL, but not by a daemon that comes later, which waits for the plugin alone.
func TestHangingPluginIsEndedAtItsLimit(t *testing.T) {
	n := newNode(t, func(o *Options) { o.Limits.DetachTries = 100 })
	first := t.TempDir()
	n.configure(t, "10.conflist", "net", map[string]any{"type": "scripted", "dir": first}, n.script())
	n.journalled(t, "web", nil)
	for _, verb := range []string{"ADD", "DEL"} {
		n.tell(t, verb+".hang")
		n.untilItHangs(t, func(limit time.Duration) (hung bool) {
			done := make(chan error, 1)
			go func() {
				if verb == "DEL" {
					done <- n.Detach(t.Context(), "web", n.NamespacePath("web"))
					return
				}
				_, err := n.try(t.Context(), "web")
				done <- err
			}()
			for over := false; !over; {
				select {
				case err := <-done:
					harness.WantError(t, err, "CNI "+verb, "not done after "+limit.String(), "killed")
					harness.Want(t, strings.Count(err.Error(), "did not answer") == 1 && !strings.Contains(err.Error(), "did not run"), "%v", err)
					harness.Want(t, strings.Contains(string(harness.Read(t, filepath.Join(first, "log"))), verb+" "), "the plugin before it got no %s: %v", verb, err)
					over = true
				case <-time.After(10 * time.Millisecond):
					hung = hung || hangs(t, "web")
				}
			}
			harness.Same(t, verb+": left running", processesWith(t, "CNI_CONTAINERID=web"), nil)
			return hung
		})
		n.untell(t, verb+".hang")
	}
	n.Options.Limits.Del = 5 * time.Second
	n.SetLimits(n.Options.Limits)
	n.tell(t, "DEL.hang")
	put(t, filepath.Join(first, "DEL.hang"), "")
	detach := func() (giveUp context.CancelCauseFunc, done chan error) {
		ctx, giveUp := context.WithCancelCause(t.Context())
		done, before := make(chan error, 1), harness.Read(t, filepath.Join(first, "log"))
		go func() { done <- n.Detach(ctx, "web", n.NamespacePath("web")) }()
		harness.Eventually(t, "the last plugin is asked", func() bool { return len(harness.Read(t, filepath.Join(first, "log"))) > len(before) })
		return giveUp, done
	}
	giveUp, done := detach()
	giveUp(errors.New("it is not wanted"))
	harness.WantError(t, <-done, "not done after 5s", "it is not wanted") // each why it was ended
	n.untell(t, "DEL.hang")
	n.Options.Limits.Del = within
	n.SetLimits(n.Options.Limits)
	_, done = detach()
	n.reopen(t)
	harness.WantError(t, <-done, "the next daemon waits for them: unavailable")
	n.mu.Lock()
	lingering := slices.Collect(maps.Keys(n.lingering))
	n.mu.Unlock()
	harness.Need(t, len(lingering) == 1, "%d runs are left", len(lingering))
	harness.Want(t, time.Until(lingering[0].deadline) <= n.Options.Limits.Del, "its limit ends in %v", time.Until(lingering[0].deadline))
	must(t, lingering[0].run.Kill(within))
	must(t, os.Remove(filepath.Join(first, "DEL.hang")))
	n.detach(t, "web")
}

// untilItHangs runs a plugin that hangs, with limits of ADD and DEL that grow until it
// did hang before it was ended: the machine may be slow.
func (n *node) untilItHangs(t *testing.T, run func(limit time.Duration) (hung bool)) {
	for limit := 700 * time.Millisecond; ; limit *= 3 {
		limits := n.Options.Limits
		limits.Add, limits.Del = limit, limit
		n.SetLimits(limits)
		if run(limit) {
			break
		}
	}
	n.SetLimits(n.Options.Limits)
}

// A plugin that cannot be killed keeps its attachment locked, under the next daemon too, and who waits for that is told
// at once, however many plugins would be next; when it ends, DEL is repeated.
func TestPluginThatCannotBeKilled(t *testing.T) {
	n := newNode(t, func(o *Options) {
		o.Limits.DetachTries, o.Limits.Del, o.Limits.Status = 100, 2*time.Second, time.Second
	})
	n.configure(t, "10.conflist", "net", slices.Repeat([]map[string]any{n.script()}, 30)...)
	freeze := harness.Disk(t, n.scripted) // it sleeps at its first line
	n.attached(t, "web")
	thaw := freeze()
	harness.WantError(t, n.Detach(harness.Limited(t), "web", ""), "not done after 2s, the plugins", "29 of the 30", errStuck.Error())
	for range 2 {
		harness.Eventually(t, "the run is stuck", func() bool { return n.isStuck("DEL", "net") && len(n.Stuck()[0].Processes) > 0 })
		harness.WantError(t, n.Detach(harness.Limited(t), "web", ""), errStuck.Error(), "stuckPlugins")
		n.reopen(t)
		n.runs(t)
	}
	thaw()
	harness.Eventually(t, "the attachment is gone", func() bool { return n.find("web") == nil && len(n.Stuck()) == 0 })
}

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
		return n.try(t.Context(), id)
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
