package network

import (
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/test/harness"
)

// The pauses between the DELs of the background grow up to a limit. One that is hurried begins at once, and counts anew.
func TestPausesBetweenDELs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, a := &CNI{base: t.Context(), journal: &state.Records[Attachment]{}}, newAttachment(Attachment{})
		a.unwritten = true // else it would be given up
		n.SetLimits(Limits{RetryFirst: 100 * time.Millisecond, RetryMost: time.Second})
		var waited []time.Duration
		for pauses := range 6 {
			began := time.Now()
			harness.Same(t, "pauses", n.awaitTry(a, pauses), pauses+1)
			waited = append(waited, time.Since(began)/time.Millisecond)
		}
		harness.Same(t, "milliseconds", waited, []time.Duration{100, 200, 400, 800, 1000, 1000})
		notify(a.hurried)
		harness.Same(t, "pauses of one that is hurried", n.awaitTry(a, 6), 0)
	})
}

// in runs a function in the network namespace at path.
func in(t *testing.T, path string, do func() error) {
	handle, err := netns.GetFromPath(path)
	must(t, err)
	defer handle.Close()
	err = process.OnDisposableThread(func() error {
		if err := netns.Set(handle); err != nil {
			return err
		}
		return do()
	})
	must(t, err)
}

func rules(t *testing.T) (rules []string) {
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		out, err := exec.Command(program).Output()
		must(t, err)
		rules = append(rules, strings.Split(string(out), "\n")...)
	}
	return rules
}

// without lists what is new and has one of the marks in it.
func without(now, before []string, marks ...string) (left []string) {
	for _, line := range now {
		if slices.ContainsFunc(marks, func(mark string) bool { return strings.Contains(line, mark) }) && !slices.Contains(before, line) {
			left = append(left, line)
		}
	}
	return left
}

func removeLinkAtEnd(t *testing.T, name string) {
	t.Cleanup(func() {
		link, err := netlink.LinkByName(name)
		if err == nil {
			err = netlink.LinkDel(link)
		}
		missing := netlink.LinkNotFoundError{}
		harness.Want(t, err == nil || errors.As(err, &missing), "%v", err)
	})
}

func must(t testing.TB, err error) { t.Helper(); harness.Check(t, err) }
