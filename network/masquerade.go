package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// masquerade gives packets that leave the default network the node's address, by one rule for each subnet, in
// an nftables table of ours. The bridge plugin (ipMasq) makes rules for each pod and lists those of all pods
// each time: with a thousand pods that takes longer than the rest of ADD.
type masquerade struct {
	table       string
	logger      *slog.Logger
	attachments func() []netip.Prefix
	// mu guards the fields below and serialises changes of the table.
	mu sync.Mutex
	// network has the default network's subnets, none while it is not in use. inForce are those in the table,
	// shown is how nft listed it then, if known. missed counts failures in a row although nft exists.
	network, inForce []netip.Prefix
	shown            string
	known, failed    bool
	missed           int
}

// masqueradeKey is the list's key of the subnets. Plugins do not get it; the journal keeps it for existing pods.
const masqueradeKey = "minicri.masquerade"

// use has the table masquerade the default network's subnets before pods use them, and reports whether it does or
// should be tried again. Without subnets another network is used, and only existing pods keep their rules.
func (m *masquerade) use(subnets []netip.Prefix) (inForce, again bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.network = subnets; len(subnets) == 0 {
		return false, false
	}
	err := m.put()
	if err == nil {
		m.missed = 0
		return true, false
	}
	m.logger.Warn("masquerading is left to the bridge plugin, which makes rules for each pod: nft could not make one for all", "err", err)
	m.network = nil
	m.missed++
	const maxTries = 10
	return false, m.missed <= maxTries && !errors.Is(err, exec.ErrNotFound)
}

// refresh restores the table if others changed it (nft flush ruleset) or pods need other subnets.
func (m *masquerade) refresh() {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.put()
	if failed := err != nil; failed != m.failed {
		m.failed = failed
		m.logger.Warn("whether a rule masquerades the default network's pods has changed", "table", m.table, "in_force", !failed, "err", err)
	}
}

func (m *masquerade) put() error {
	subnets := unique(m.network, m.attachments())
	list := func() (string, error) {
		if len(subnets) == 0 {
			return "", nil
		}
		return nft("", "list", "table", "inet", m.table)
	}
	if m.known && slices.Equal(subnets, m.inForce) {
		if shown, err := list(); err == nil && shown == m.shown {
			return nil
		}
	}
	m.known = false
	_, err := nft(m.script(subnets), "--file", "-")
	if len(subnets) == 0 && errors.Is(err, exec.ErrNotFound) {
		err = nil // where nft is not there, no daemon has made a table
	}
	if err != nil {
		return err
	}
	m.inForce = subnets
	m.shown, err = list()
	m.known = err == nil
	return err
}

// script returns one transaction from any state. Multicast is excluded: members' answers would not arrive.
func (m *masquerade) script(subnets []netip.Prefix) string {
	if len(subnets) == 0 {
		return fmt.Sprintf("add table inet %[1]s\ndelete table inet %[1]s\n", m.table)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "add table inet %[1]s\nadd chain inet %[1]s postrouting { type nat hook postrouting priority srcnat; }\nflush chain inet %[1]s postrouting\n", m.table)
	for _, subnet := range subnets {
		family, groups := "ip6", "ff00::/8"
		if subnet.Addr().Is4() {
			family, groups = "ip", "224.0.0.0/4"
		}
		fmt.Fprintf(&b, "add rule inet %[1]s postrouting %[2]s saddr %[3]s %[2]s daddr != { %[3]s, %[4]s } masquerade\n", m.table, family, subnet, groups)
	}
	return b.String()
}

func nft(input string, arguments ...string) (string, error) {
	return runFilter("nft", input, arguments...)
}

// runFilter runs a program that changes or lists the packet filter.
func runFilter(program, input string, arguments ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), nftLimit)
	defer cancel()
	command := exec.CommandContext(ctx, program, arguments...)
	command.WaitDelay = nftLimit / 5 // a child of a wrapper may hold its output
	command.Stdin = strings.NewReader(input)
	var out, said bytes.Buffer
	command.Stdout, command.Stderr = &out, &said
	if err := command.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", program, strings.Join(arguments, " "), err, bytes.TrimSpace(said.Bytes()))
	}
	return out.String(), nil
}

// followMasquerade keeps the table current and, at the end, leaves what pods need: without them, the node may
// get another network with the same subnet.
func (n *CNI) followMasquerade() {
	changed := make(chan struct{}, 1)
	n.inBackground(func() { watchRules(n.base, changed) })
	for n.base.Err() == nil {
		n.masquerade.refresh()
		n.forward.refresh()
		if err := keepRouterRoutes(n.options.Logger, n.forward.subnets()); err != nil {
			n.readAgain.Store(true) // the directory reports it
		}
		n.awaitPeriod(n.base, changed, func(l Limits) time.Duration { return l.StatusPeriod })
	}
	n.masquerade.use(nil)
	n.masquerade.refresh()
	n.forward.use(nil)
}

// watchRules reports changes of nftables rules, a few times a second at most, if the kernel does.
func watchRules(ctx context.Context, changed chan<- struct{}) {
	const group = 7 // NFNLGRP_NFTABLES
	socket, err := nl.Subscribe(unix.NETLINK_NETFILTER, group)
	if err != nil {
		return
	}
	defer socket.Close()
	defer context.AfterFunc(ctx, socket.Close)()
	for ctx.Err() == nil {
		_, _, _ = socket.Receive() // an error is that there were too many changes, or the end
		notify(changed)
		select {
		case <-ctx.Done():
		case <-time.After(rulesPause):
		}
	}
}

// subnetsUnder returns the subnets that attachments have under a key. Nearly all share a configuration, decoded once.
func (n *CNI) subnetsUnder(key string) (subnets []netip.Prefix) {
	n.mu.Lock()
	defer n.mu.Unlock()
	seen := make(map[string]bool)
	for _, a := range n.attachments {
		if config := a.record.Config; !seen[string(config)] {
			seen[string(config)] = true
			subnets = append(subnets, subnetsOf(config, key)...)
		}
	}
	return subnets
}
