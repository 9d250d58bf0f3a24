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
)

// processesWith lists the processes, but ourselves, that have a variable in
// their environment and have not ended.
func processesWith(t *testing.T, variables ...string) (found []string) {
	t.Helper()
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

// hanging waits until the plugin, its IPAM plugin and the children of that
// hang for a sandbox.
func hanging(t *testing.T, id string) {
	t.Helper()
	eventually(t, within, "the whole tree of plugins hangs", func() bool { return hangs(t, id) })
}

func hangs(t *testing.T, id string) bool {
	t.Helper()
	found := processesWith(t, "CNI_CONTAINERID="+id)
	return len(found) >= 4 && strings.Contains(strings.Join(found, "\n"), "stuck-ipam")
}

// A plugin that hangs is ended at its limit with all that it started, however
// little that listens to signals.
func TestHangingPluginIsEndedAtItsLimit(t *testing.T) {
	n := newNode(t, func(o *Options) { o.Limits.DetachTries = 100 })
	n.configure(t, "10.conflist", "net", n.script())
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
					wantError(t, err, "CNI "+verb, "not done after "+limit.String(), "killed")
					over = true
				case <-time.After(10 * time.Millisecond):
					hung = hung || hangs(t, "web")
				case <-tooLate:
					t.Fatalf("%s does not end", verb)
				}
			}
			if left := processesWith(t, "CNI_CONTAINERID=web"); len(left) > 0 {
				t.Errorf("%s: left running: %q", verb, left)
			}
			return hung
		})
		n.untell(t, verb+".hang")
	}
	n.detach(t, "web")
}

// untilItHangs runs a plugin that hangs, with limits of ADD and DEL that grow until it
// did hang before it was ended: the machine may be slow.
func (n *node) untilItHangs(t *testing.T, run func(limit time.Duration) (hung bool)) {
	t.Helper()
	for limit := 700 * time.Millisecond; ; limit *= 3 {
		if limit > within {
			t.Fatalf("it does not hang within %v", limit/3)
		}
		limits := n.Options.Limits
		limits.Add, limits.Del = limit, limit
		n.SetLimits(limits)
		if run(limit) {
			break
		}
	}
	n.SetLimits(n.Options.Limits)
}

// While a plugin hangs for one pod, others are attached, and only its own
// detach waits, for as long as its caller likes. It is ended when its caller gives
// up, whose reason is in the error.
func TestAHangingPluginHoldsUpNobodyElse(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "net", n.script())
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
	if result := n.attach(t, "web"); fmt.Sprint(result.Addresses) != "[192.0.2.7]" {
		t.Errorf("addresses %v", result.Addresses)
	}
	n.detach(t, "web")
	short, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	if err := n.Detach(short, "stuck", ""); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Detach beside an ADD that hangs: %v", err)
	}
	if len(n.calls(t, "DEL")) != 1 {
		t.Error("DEL ran beside ADD")
	}
	if len(processesWith(t, "CNI_CONTAINERID=stuck")) < 4 {
		t.Error("the plugins of another pod were ended")
	}
	cancel(reason)
	if err := <-done; !errors.Is(err, reason) {
		t.Errorf("got %v, want %v", err, reason)
	}
	if left := processesWith(t, "CNI_CONTAINERID=stuck"); len(left) > 0 {
		t.Errorf("left running: %q", left)
	}
	n.detach(t, "stuck")
}
