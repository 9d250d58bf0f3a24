package network

import (
	"bytes"
	"context"
	"encoding/json"
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

// masquerade gives what pods of the default network send out of it the node's
// address, by one rule for all pods, in an nftables table of this daemon's own. The
// bridge plugin (ipMasq) makes rules for each pod, and lists those of all pods for each:
// with a thousand pods that takes longer than all else that an ADD does.
type masquerade struct {
	table  string
	logger *slog.Logger

	// mu guards the fields below and orders the changes of the table.
	mu sync.Mutex
	// network are the subnets of the default network, none while it is not in use.
	network []netip.Prefix
	// inForce are the subnets that the table was made for, shown is the table as it
	// was then; known is set while they are so, and not after an nft that was cut short.
	inForce []netip.Prefix
	shown   string
	known   bool
	// refreshed is set when the table is made anew for the first time: until then it may
	// have what an earlier daemon's attachments need, which are not known yet.
	refreshed bool
	failed    bool
	// missed is how often in a row the rule could not be made, though nft is there.
	missed int
}

// masqueradeKey is the key of a configuration list, which plugins do not get, with
// the subnets that the table masquerades. Attachments have it in the journal, so pods
// keep it when the default network changes.
const masqueradeKey = "minicri.masquerade"

// nftLimit is how long nft may take, and what it has started a second more.
const nftLimit = 5 * time.Second

func newMasquerade(mark string, logger *slog.Logger) *masquerade {
	return &masquerade{table: mark + "masquerade", logger: logger}
}

// use has the table masquerade the subnets of the default network, before a pod is in
// it, and tells whether it does. None are for any other network.
func (m *masquerade) use(ctx context.Context, subnets []netip.Prefix) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.network = nil
	if len(subnets) == 0 {
		return false // what is in the table goes with the pods that need it
	}
	if err := m.put(ctx, slices.Concat(m.inForce, subnets)); err != nil {
		m.logger.Warn("masquerading is left to the bridge plugin, which makes rules for each pod: nft could not make one for all", "err", err)
		if !errors.Is(err, exec.ErrNotFound) {
			m.missed++
		}
		return false
	}
	m.network, m.missed = subnets, 0
	return true
}

// tryAgain reports whether it is worth another try that the rule could not be made.
func (m *masquerade) tryAgain() bool {
	const mostTries = 10
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.missed > 0 && m.missed <= mostTries
}

// refresh makes the table anew when others have changed it (nft flush ruleset), or when
// attachments need other subnets.
func (m *masquerade) refresh(ctx context.Context, ofAttachments func() []netip.Prefix) {
	m.mu.Lock()
	defer m.mu.Unlock()
	subnets := slices.Concat(m.network, ofAttachments())
	if !m.refreshed {
		m.refreshed, m.known = true, false
	}
	err := m.put(ctx, subnets)
	if failed := err != nil; failed != m.failed && ctx.Err() == nil {
		m.failed = failed
		m.logger.Warn("the rule that masquerades the default network's pods was looked at", "table", m.table, "in_force", !failed, "err", err)
	}
}

// leave leaves in the table what attachments need: a node whose last pod is gone may
// get another network, with the same subnet, and no daemon that would remove it.
func (m *masquerade) leave(ctx context.Context, ofAttachments func() []netip.Prefix) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.network = nil
	if err := m.put(ctx, ofAttachments()); err != nil {
		m.logger.Warn("the table that masquerades the default network's pods is left as it was", "table", m.table, "err", err)
	}
}

// put makes the table what it has to be, if it is not.
func (m *masquerade) put(ctx context.Context, subnets []netip.Prefix) error {
	subnets = outermost(subnets)
	if m.known && slices.Equal(subnets, m.inForce) {
		shown, err := m.show(ctx)
		if err == nil && shown == m.shown {
			return nil
		}
	}
	return m.write(ctx, subnets)
}

func (m *masquerade) write(ctx context.Context, subnets []netip.Prefix) error {
	m.known = false
	_, err := nft(ctx, m.script(subnets), "--file", "-")
	if len(subnets) == 0 && errors.Is(err, exec.ErrNotFound) {
		err = nil // where nft is not there, no daemon has made a table
	}
	if err != nil {
		return err
	}
	m.inForce = subnets
	m.shown, err = m.show(ctx)
	m.known = err == nil
	return err
}

// show is the table as nft prints it, nothing where there has to be none.
func (m *masquerade) show(ctx context.Context) (string, error) {
	if len(m.inForce) == 0 {
		return "", nil
	}
	return nft(ctx, "", "list", "table", "inet", m.table)
}

// script is one transaction, whatever there was. What goes to a group is not
// masqueraded: the answers of its members would not come.
func (m *masquerade) script(subnets []netip.Prefix) string {
	var b strings.Builder
	fmt.Fprintf(&b, "add table inet %s\n", m.table)
	if len(subnets) == 0 {
		fmt.Fprintf(&b, "delete table inet %s\n", m.table)
		return b.String()
	}
	fmt.Fprintf(&b, "add chain inet %s postrouting { type nat hook postrouting priority srcnat; }\n", m.table)
	if m.refreshed {
		fmt.Fprintf(&b, "flush chain inet %s postrouting\n", m.table)
	}
	for _, family := range []struct {
		name, groups string
		is           func(netip.Addr) bool
	}{{"ip", "224.0.0.0/4", netip.Addr.Is4}, {"ip6", "ff00::/8", netip.Addr.Is6}} {
		var own []string
		for _, subnet := range subnets {
			if family.is(subnet.Addr()) {
				own = append(own, subnet.String())
			}
		}
		if len(own) > 0 {
			all := strings.Join(own, ", ")
			fmt.Fprintf(&b, "add rule inet %[1]s postrouting %[2]s saddr { %[3]s } %[2]s daddr != { %[3]s, %[4]s } masquerade\n",
				m.table, family.name, all, family.groups)
		}
	}
	return b.String()
}

// outermost are the subnets in order, each once, without those that lie within others.
func outermost(subnets []netip.Prefix) (all []netip.Prefix) {
	subnets = slices.Clone(subnets)
	slices.SortFunc(subnets, func(a, b netip.Prefix) int {
		if a.Bits() != b.Bits() {
			return a.Bits() - b.Bits()
		}
		return a.Addr().Compare(b.Addr())
	})
	for _, subnet := range subnets {
		if !slices.ContainsFunc(all, func(p netip.Prefix) bool { return p.Contains(subnet.Addr()) }) {
			all = append(all, subnet)
		}
	}
	return all
}

func nft(ctx context.Context, input string, arguments ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, nftLimit)
	defer cancel()
	command := exec.CommandContext(ctx, "nft", arguments...)
	command.WaitDelay = time.Second // a child of a wrapper may hold its output
	command.Stdin = strings.NewReader(input)
	var out, said bytes.Buffer
	command.Stdout, command.Stderr = &out, &said
	if err := command.Run(); err != nil {
		return "", fmt.Errorf("nft %s: %w: %s", strings.Join(arguments, " "), err, bytes.TrimSpace(said.Bytes()))
	}
	return out.String(), nil
}

// followMasquerade keeps the table as it has to be, and leaves it as pods without a
// daemon need it.
func (n *CNI) followMasquerade(ctx context.Context) {
	changed := make(chan struct{}, 1)
	var watching sync.WaitGroup
	watching.Go(func() { watchRules(ctx, changed) })
	for ctx.Err() == nil {
		n.masquerade.refresh(ctx, n.masqueraded)
		n.awaitPeriod(ctx, changed, func(l Limits) time.Duration { return l.StatusPeriod })
	}
	watching.Wait()
	n.masquerade.leave(context.WithoutCancel(ctx), n.masqueraded)
}

// watchRules tells when somebody has changed rules of nftables, a few times in a second
// at most. Where the kernel does not tell, the table is looked at once in a period.
func watchRules(ctx context.Context, changed chan<- struct{}) {
	const group, pause = 7, 300 * time.Millisecond // NFNLGRP_NFTABLES
	socket, err := nl.Subscribe(unix.NETLINK_NETFILTER, group)
	if err != nil {
		return
	}
	defer socket.Close()
	defer context.AfterFunc(ctx, socket.Close)()
	for ctx.Err() == nil {
		_, _, _ = socket.Receive() // an error is that there were too many changes, or the end
		select {
		case changed <- struct{}{}:
		default:
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// masqueraded are the subnets that the table masquerades for attachments. Nearly all
// of those have the configuration of now, which is read once.
func (n *CNI) masqueraded() []netip.Prefix {
	n.mu.Lock()
	defer n.mu.Unlock()
	var subnets []netip.Prefix
	seen := make(map[string]bool)
	for _, a := range n.attachments {
		if config := a.record.Config; !seen[string(config)] {
			seen[string(config)] = true
			subnets = append(subnets, masqueradedBy(config)...)
		}
	}
	return subnets
}

// masqueradedBy are the subnets that the table masquerades for pods of a configuration.
func masqueradedBy(config []byte) []netip.Prefix {
	if !bytes.Contains(config, []byte(masqueradeKey)) {
		return nil
	}
	var list struct {
		Subnets []netip.Prefix `json:"minicri.masquerade"`
	}
	_ = json.Unmarshal(config, &list) // one that cannot be decoded is go-cni's to report
	return list.Subnets
}
