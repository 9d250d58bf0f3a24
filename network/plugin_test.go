package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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

// hanging waits until the plugin, its IPAM plugin and the children of that hang for a sandbox.
func hanging(t *testing.T, id string) {
	eventually(t, within, "the whole tree of plugins hangs", func() bool { return hangs(t, id) })
}

func hangs(t *testing.T, id string) bool {
	found := processesWith(t, "CNI_CONTAINERID="+id)
	return len(found) >= 4 && strings.Contains(strings.Join(found, "\n"), "stuck-ipam")
}

// A plugin that hangs is ended at its limit with all that it started, however little that listens to signals.
func TestHangingPluginIsEndedAtItsLimit(t *testing.T) {
	n := newScripted(t, func(o *Options) { o.Limits.DetachTries = 100 })
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
				_, err := n.Attach(t.Context(), "web", n.Options.Namespaces.Path("web"))
				done <- err
			}()
			tooLate := time.After(limit + within)
			for over := false; !over; {
				select {
				case err := <-done:
					harness.WantError(t, err, "CNI "+verb, "not done after "+limit.String(), "killed")
					over = true
				case <-time.After(10 * time.Millisecond):
					hung = hung || hangs(t, "web")
				case <-tooLate:
					t.Fatalf("%s does not end", verb)
				}
			}
			harness.Same(t, verb+": left running", processesWith(t, "CNI_CONTAINERID=web"), nil)
			return hung
		})
		n.untell(t, verb+".hang")
	}
	n.detach(t, "web")
}

// untilItHangs runs a plugin that hangs, with limits of ADD and DEL that grow until it
// did hang before it was ended: the machine may be slow.
func (n *node) untilItHangs(t *testing.T, run func(limit time.Duration) (hung bool)) {
	for limit := 700 * time.Millisecond; ; limit *= 3 {
		harness.Need(t, limit <= within, "it does not hang within %v", limit/3)
		limits := n.Options.Limits
		limits.Add, limits.Del = limit, limit
		n.SetLimits(limits)
		if run(limit) {
			break
		}
	}
	n.SetLimits(n.Options.Limits)
}

// While a plugin hangs for one pod, others are attached, and only its own detach waits, for as long as its caller
// likes. It is ended when its caller gives up, whose reason is in the error.
func TestAHangingPluginHoldsUpNobodyElse(t *testing.T) {
	n := newScripted(t, nil)
	n.journalled(t, "stuck", nil)
	n.journalled(t, "web", nil)
	n.tell(t, "ADD.hang")
	reason := errors.New("the pod is not wanted any more")
	ctx, cancel := context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := n.Attach(ctx, "stuck", n.Options.Namespaces.Path("stuck"))
		done <- err
	}()
	hanging(t, "stuck")
	n.untell(t, "ADD.hang")
	harness.Same(t, "addresses", fmt.Sprint(n.attach(t, "web").Addresses), "[192.0.2.7]")
	n.detach(t, "web")
	short, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	err := n.Detach(short, "stuck", "")
	harness.Want(t, errors.Is(err, context.DeadlineExceeded), "Detach beside an ADD that hangs: %v", err)
	harness.Want(t, len(n.calls(t, "DEL")) == 1, "DEL ran beside ADD")
	harness.Want(t, len(processesWith(t, "CNI_CONTAINERID=stuck")) >= 4, "the plugins of another pod were ended")
	cancel(reason)
	err = <-done
	harness.Want(t, errors.Is(err, reason), "got %v, want %v", err, reason)
	harness.Same(t, "left running", processesWith(t, "CNI_CONTAINERID=stuck"), nil)
	n.detach(t, "stuck")
}
