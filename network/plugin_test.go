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
	if err != nil {
		t.Fatal(err)
	}
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
	eventually(t, within, "the whole tree of plugins hangs", func() bool {
		found := processesWith(t, "CNI_CONTAINERID="+id)
		return len(found) >= 4 && strings.Contains(strings.Join(found, "\n"), "stuck-ipam")
	})
}

// A plugin that hangs is ended at its limit with all that it started, however
// little that listens to signals.
func TestHangingPluginIsEndedAtItsLimit(t *testing.T) {
	n := newNode(t, func(o *Options) { o.Limits.Add, o.Limits.Del = 700*time.Millisecond, 700*time.Millisecond })
	n.configure(t, "10.conflist", "net", n.script())
	n.journalled(t, "web", nil)
	for _, verb := range []string{"ADD", "DEL"} {
		n.tell(t, verb+".hang")
		began, done := time.Now(), make(chan error, 1)
		go func() {
			if verb == "DEL" {
				done <- n.Detach(t.Context(), "web", n.NamespacePath("web"))
				return
			}
			_, err := n.Attach(t.Context(), "web", n.Options.Namespaces.Path("web"), nil)
			done <- err
		}()
		hanging(t, "web")
		wantError(t, <-done, "CNI "+verb, "not done after 700ms", "killed")
		if left := processesWith(t, "CNI_CONTAINERID=web"); len(left) > 0 {
			t.Errorf("%s: left running: %q", verb, left)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("%s took %v", verb, took)
		}
		n.untell(t, verb+".hang")
	}
	n.detach(t, "web")
}

// A caller that gives up has the same effect, and its reason is in the error.
func TestHangingPluginIsEndedWithItsContext(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "net", n.script())
	n.journalled(t, "web", nil)
	n.tell(t, "ADD.hang")
	reason := errors.New("the pod is not wanted any more")
	ctx, cancel := context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := n.Attach(ctx, "web", n.Options.Namespaces.Path("web"), nil)
		done <- err
	}()
	hanging(t, "web")
	cancel(reason)
	if err := <-done; !errors.Is(err, reason) {
		t.Errorf("got %v, want %v", err, reason)
	}
	if left := processesWith(t, "CNI_CONTAINERID=web"); len(left) > 0 {
		t.Errorf("left running: %q", left)
	}
	n.detach(t, "web")
}

// While a plugin hangs for one pod, others are attached, and only its own
// detach waits, for as long as its caller likes.
func TestAHangingPluginHoldsUpNobodyElse(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "net", n.script())
	n.journalled(t, "stuck", nil)
	n.journalled(t, "web", nil)
	n.tell(t, "ADD.hang")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := n.Attach(ctx, "stuck", n.Options.Namespaces.Path("stuck"), nil)
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
	cancel()
	if err := <-done; err == nil {
		t.Error("ADD succeeded")
	}
	n.detach(t, "stuck")
}

// A plugin that starts children as fast as it can, none of which hold
// anything of it, leaves none behind.
func TestPluginThatForksIsEnded(t *testing.T) {
	n := newNode(t, func(o *Options) { o.Limits.Add = 150 * time.Millisecond })
	n.configure(t, "10.conflist", "net", n.script())
	n.journalled(t, "web", nil)
	n.tell(t, "ADD.fork")
	for range 10 {
		_, err := n.Attach(t.Context(), "web", n.Options.Namespaces.Path("web"), nil)
		wantError(t, err, "not done after")
		if left := processesWith(t, "CNI_CONTAINERID=web"); len(left) > 0 {
			t.Fatalf("left running: %d, as %q", len(left), left[0])
		}
	}
	n.detach(t, "web")
}
