package network

import (
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/test/harness"
)

// in runs a function in the network namespace at path.
func in(t *testing.T, path string, do func() error) {
	handle, err := netns.GetFromPath(path)
	must(t, err)
	defer handle.Close()
	err = namespace.OnDisposableThread(func() error {
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
