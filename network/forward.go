package network

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// forward accepts the embedded network's packets in the chains of others that drop what nobody accepts: Docker and ufw
// set such a policy, firewalld and RHEL end with such a rule. An accept in a chain of our own would not help, because
// each chain of the hook decides. Our rules stand before the first rule, or policy, that drops everything: conditions
// of an administrator go before them.
type forward struct {
	mark        string // the comment of our rules
	logger      *slog.Logger
	attachments func() []netip.Prefix
	changing    sync.Mutex // held while programs list and change the rules
	clean       bool       // no rule of ours exists; changing guards it
	mu          sync.Mutex // guards the fields below; no program runs under it
	network     []netip.Prefix
	problem     string
}

// forwardKey is the list's key of the subnets. Plugins do not get it; the journal keeps it for existing pods.
const forwardKey = "minicri.forward"

// use has the rules for the subnets, none while the embedded network is not in use.
func (f *forward) use(subnets []netip.Prefix) {
	f.mu.Lock()
	f.network = subnets
	f.mu.Unlock()
	f.refresh()
}

// refresh restores what others have changed.
func (f *forward) refresh() {
	f.changing.Lock()
	defer f.changing.Unlock()
	subnets := unique(f.subnets(), f.attachments())
	if len(subnets) == 0 && f.clean {
		return
	}
	problem := ""
	if err := f.put(subnets); err != nil {
		problem = err.Error()
	}
	f.clean = len(subnets) == 0 && problem == ""
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.problem != problem {
		f.problem = problem
		accepted := problem == ""
		f.logger.Warn("whether rules accept the default network's packets has changed",
			"accepted", accepted, "err", problem)
	}
}

// subnets returns those of the embedded network, none while it is not in use.
func (f *forward) subnets() []netip.Prefix {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.network
}

// blocked returns why packets may be dropped, "" if nothing is known.
func (f *forward) blocked() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.problem
}

func (f *forward) put(subnets []netip.Prefix) error {
	var errs []error
	for _, filter := range packetFilters() {
		chains, err := filter.chains(f.mark)
		if err != nil {
			errs = append(errs, err)
		}
		for _, c := range chains {
			errs = append(errs, f.open(filter, c, subnets))
		}
	}
	return errors.Join(errs...)
}

// left reports whether a chain has rules of ours.
func (f *forward) left() (any bool) {
	for _, filter := range packetFilters() {
		chains, _ := filter.chains(f.mark)
		for _, c := range chains {
			any = any || slices.ContainsFunc(c.rules, func(r filterRule) bool { return r.own != "" })
		}
	}
	return any
}

// open puts our rules into a chain, or removes them if it drops nothing.
func (f *forward) open(filter packetFilter, c *filterChain, subnets []netip.Prefix) error {
	var want, have []string
	end, verdict := c.outcome(0)
	for _, subnet := range subnets {
		if verdict == "drop" && (c.family == "inet" || subnet.Addr().Is4() == (c.family == "ip")) {
			want = append(want, "saddr "+subnet.String(), "daddr "+subnet.String())
		}
	}
	misplaced := false
	for i, r := range c.rules {
		if r.own != "" {
			have = append(have, r.own)
			misplaced = misplaced || i > end
		}
	}
	if slices.Equal(want, have) && !misplaced {
		return nil
	}
	if err := filter.change(c, end, want, f.mark); err != nil {
		return fmt.Errorf("%s drops the packets of pods, and no rules can be added: %w: accept packets from and to %v there",
			c, err, subnets)
	}
	return nil
}

// packetFilter is a part of the kernel's packet filter: nftables, or the older tables of one address family.
type packetFilter interface {
	// chains returns those of the hook forward.
	chains(mark string) ([]*filterChain, error)
	// change replaces our rules in a chain; the new ones stand before the rule with an index, or last.
	change(c *filterChain, before int, rules []string, mark string) error
}

// filterChain is a chain of a packet filter. others are those of its table, to which it may jump.
type filterChain struct {
	family, table, name string
	drops               bool // by its policy
	rules               []filterRule
	others              map[string]*filterChain
}

func (c *filterChain) String() string {
	return fmt.Sprintf("chain %s of table %s %s", c.name, c.family, c.table)
}

type filterRule struct {
	handle  int    // for nft
	own     string // "saddr SUBNET" or "daddr SUBNET" of a rule of ours, "" of another one
	always  bool   // it has no condition
	verdict string // accept, drop, return, or "" if it has none
	jump    string // the chain that it goes on in
	leaves  bool   // it does not come back from there
}

// outcome returns what becomes of packets without a rule about them, accept, drop or "", and the index of the rule that
// decides.
func (c *filterChain) outcome(depth int) (int, string) {
	const deepest = 16 // as in the kernel, which refuses loops
	for i, r := range c.rules {
		if !r.always || r.own != "" {
			continue
		}
		verdict := r.verdict
		if next := c.others[r.jump]; next != nil && depth < deepest {
			_, verdict = next.outcome(depth + 1)
		}
		switch {
		case verdict == "accept" || verdict == "drop":
			return i, verdict
		case verdict == "return" || r.leaves:
			return len(c.rules), c.policy()
		}
	}
	return len(c.rules), c.policy()
}

func (c *filterChain) policy() string {
	if c.drops {
		return "drop"
	}
	return ""
}

// packetFilters returns the parts that this machine has and has programs for.
func packetFilters() (filters []packetFilter) {
	_, err := nft("", "list", "chains")
	if err == nil {
		filters = append(filters, nftFilter{})
	}
	for _, family := range []string{"ip", "ip6"} {
		loaded, _ := os.ReadFile("/proc/thread-self/net/" + family + "_tables_names")
		kinds := [][]string{}
		if slices.Contains(strings.Fields(string(loaded)), "filter") {
			kinds = append(kinds, []string{family + "tables-legacy", family + "tables"})
		}
		if err != nil { // no nft lists the chains that iptables has there
			kinds = append(kinds, []string{family + "tables-nft", family + "tables"})
		}
		for _, programs := range kinds {
			found := func(program string) bool { _, err := exec.LookPath(program); return err == nil }
			filter := slices.IndexFunc(programs, found)
			if filter >= 0 && !slices.Contains(filters, packetFilter(tablesFilter{family, programs[filter]})) {
				filters = append(filters, tablesFilter{family, programs[filter]})
			}
		}
	}
	return filters
}

type nftFilter struct{}

type nftRule struct {
	Family, Table, Chain, Name string
	Hook, Policy               string
	Handle                     int
	Comment                    string
	Expr                       []map[string]json.RawMessage
}

func nftList(arguments ...string) (chains, rules []nftRule, err error) {
	text, err := nft("", append([]string{"-j", "-a", "list"}, arguments...)...)
	if err != nil {
		return nil, nil, err
	}
	var all struct {
		Nftables []struct{ Chain, Rule *nftRule }
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, nil, fmt.Errorf("nft list %s: %w", strings.Join(arguments, " "), err)
	}
	for _, one := range all.Nftables {
		if one.Chain != nil {
			chains = append(chains, *one.Chain)
		}
		if one.Rule != nil {
			rules = append(rules, *one.Rule)
		}
	}
	return chains, rules, nil
}

func (nftFilter) chains(mark string) (found []*filterChain, err error) {
	all, _, err := nftList("chains")
	for _, one := range all {
		if one.Hook != "forward" || !slices.Contains([]string{"ip", "ip6", "inet"}, one.Family) {
			continue
		}
		c := &filterChain{family: one.Family, table: one.Table, name: one.Name, drops: one.Policy == "drop"}
		c.others = make(map[string]*filterChain)
		if err := c.list(mark); err != nil {
			return found, err
		}
		found = append(found, c)
	}
	return found, err
}

// list reads the chain's rules, and those of the chains to which all packets go: tables have very many others.
func (c *filterChain) list(mark string) error {
	const most = 64
	_, rules, err := nftList("chain", c.family, c.table, c.name)
	if err != nil {
		return err
	}
	for _, r := range rules {
		rule := r.parse(mark)
		c.rules = append(c.rules, rule)
		if rule.jump == "" || !rule.always || c.others[rule.jump] != nil || len(c.others) >= most {
			continue
		}
		next := &filterChain{family: c.family, table: c.table, name: rule.jump, others: c.others}
		c.others[rule.jump] = next
		if err := next.list(mark); err != nil {
			return err
		}
	}
	return nil
}

func (r *nftRule) parse(mark string) (rule filterRule) {
	rule.handle, rule.always = r.Handle, true
	var match struct {
		Left  struct{ Payload struct{ Field string } }
		Right struct {
			Prefix struct {
				Addr string
				Len  int
			}
		}
	}
	for _, expression := range r.Expr {
		for kind, value := range expression {
			switch kind {
			case "accept", "drop", "return":
				rule.verdict = kind
			case "reject":
				rule.verdict = "drop"
			case "jump", "goto":
				var to struct{ Target string }
				_ = json.Unmarshal(value, &to) // what cannot be decoded leads nowhere
				rule.jump, rule.leaves = to.Target, kind == "goto"
			case "counter", "log", "comment":
			case "xt":
				var extension struct{ Type, Name string }
				_ = json.Unmarshal(value, &extension)
				if extension.Name == "REJECT" {
					rule.verdict = "drop"
				}
				rule.always = rule.always && slices.Contains([]string{"REJECT", "LOG", "comment"}, extension.Name)
			default:
				rule.always = false
				_ = json.Unmarshal(value, &match)
			}
		}
	}
	if r.Comment == mark {
		rule.own = fmt.Sprintf("%s %s/%d", match.Left.Payload.Field, match.Right.Prefix.Addr, match.Right.Prefix.Len)
	}
	return rule
}

func (nftFilter) change(c *filterChain, before int, rules []string, mark string) error {
	var b strings.Builder
	in := c.family + " " + c.table + " " + c.name
	for _, r := range c.rules {
		if r.own != "" {
			fmt.Fprintf(&b, "delete rule %s handle %d\n", in, r.handle)
		}
	}
	where := "add rule " + in
	if before < len(c.rules) {
		where = fmt.Sprintf("insert rule %s handle %d", in, c.rules[before].handle)
	}
	for _, r := range rules {
		family := "ip"
		if strings.Contains(r, ":") {
			family = "ip6"
		}
		fmt.Fprintf(&b, "%s %s %s accept comment %q\n", where, family, r, mark)
	}
	_, err := nft(b.String(), "--file", "-")
	return err
}

// tablesFilter is iptables or ip6tables of a kind.
type tablesFilter struct{ family, program string }

func (t tablesFilter) chains(mark string) ([]*filterChain, error) {
	text, err := runFilter(t.program, "", "-w", "-S")
	if err != nil {
		return nil, err
	}
	chains := make(map[string]*filterChain)
	in := func(name string) *filterChain {
		if chains[name] == nil {
			chains[name] = &filterChain{family: t.family, table: "filter", name: name, others: chains}
		}
		return chains[name]
	}
	for line := range strings.Lines(text) {
		words := strings.SplitN(strings.TrimSpace(line), " ", 3)
		switch {
		case len(words) < 3:
		case words[0] == "-P":
			in(words[1]).drops = words[2] == "DROP"
		case words[0] == "-A":
			c := in(words[1])
			c.rules = append(c.rules, parseTables(words[2], mark))
		}
	}
	return []*filterChain{in("FORWARD")}, nil
}

var commentMatch = regexp.MustCompile(`-m comment --comment ("(?:[^"\\]|\\.)*"|\S+) `)

// parseTables parses a rule as 'iptables -S' prints it, without its chain: conditions and then -j or -g with a target.
func parseTables(text, mark string) (rule filterRule) {
	ours := strings.Contains(text, "--comment "+mark+" ") || strings.Contains(text, "--comment "+strconv.Quote(mark)+" ")
	words := strings.Fields(commentMatch.ReplaceAllString(text, ""))
	target := slices.IndexFunc(words, func(word string) bool { return word == "-j" || word == "-g" })
	rule.always = target == 0
	if target < 0 || target+1 == len(words) {
		return rule
	}
	switch to := words[target+1]; to {
	case "ACCEPT", "DROP", "RETURN":
		rule.verdict = strings.ToLower(to)
	case "REJECT":
		rule.verdict = "drop"
	default:
		rule.jump, rule.leaves = to, words[target] == "-g"
	}
	if ours && target > 1 {
		rule.own = map[string]string{"-s": "saddr ", "-d": "daddr "}[words[0]] + words[1]
	}
	return rule
}

func (t tablesFilter) change(c *filterChain, before int, rules []string, mark string) error {
	spec := func(rule string) []string {
		direction, subnet, _ := strings.Cut(rule, " ")
		flag := map[string]string{"saddr": "-s", "daddr": "-d"}[direction]
		return []string{flag, subnet, "-m", "comment", "--comment", mark, "-j", "ACCEPT"}
	}
	place := 1
	for i, r := range c.rules {
		if r.own != "" {
			if _, err := runFilter(t.program, "", append([]string{"-w", "-D", c.name}, spec(r.own)...)...); err != nil {
				return err
			}
		} else if i < before {
			place++
		}
	}
	for i, r := range rules {
		insert := append([]string{"-w", "-I", c.name, strconv.Itoa(place + i)}, spec(r)...)
		if _, err := runFilter(t.program, "", insert...); err != nil {
			return err
		}
	}
	return nil
}

// unique returns the prefixes of lists, sorted, each once.
func unique(lists ...[]netip.Prefix) []netip.Prefix {
	all := slices.Concat(lists...)
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

// subnetsOf returns the subnets that a configuration has under a key.
func subnetsOf(config []byte, key string) (subnets []netip.Prefix) {
	var list map[string]json.RawMessage
	if bytes.Contains(config, []byte(key)) && json.Unmarshal(config, &list) == nil {
		_ = json.Unmarshal(list[key], &subnets) // one that cannot be decoded is go-cni's to report
	}
	return subnets
}
