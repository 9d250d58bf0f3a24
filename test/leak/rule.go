package leak

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
)

// ruleList is a program that prints the rules of the calling thread's network
// namespace, and the lines of it that belong to one attachment.
type ruleList struct {
	command []string
	ours    func(line string) bool
}

// attachmentChain matches the chains of one attachment: masquerade's
// CNI-HASH and portmap's CNI-DN-HASH.
var attachmentChain = regexp.MustCompile(`CNI-(DN-)?[0-9a-f]{16,}`)

// addRules adds chains and rules that CNI plugins made for one attachment.
//
// What plugins share stays for good after the last DEL and does not count: in
// iptables the chains CNI-HOSTPORT-*, CNI-FORWARD and CNI-ADMIN, in nftables
// the tables cni_hostport and cni_plugins_masquerade.
func (s Snapshot) addRules(ctx context.Context, scope Scope) error {
	var lists []ruleList
	if scope.Rules {
		lists = []ruleList{
			{[]string{"iptables-save"}, ofAttachment},
			{[]string{"ip6tables-save"}, ofAttachment},
			{[]string{"nft", "--stateless", "list", "ruleset"}, ofAttachmentNft},
		}
	}
	if scope.Tables {
		lists = append(lists, ruleList{[]string{"nft", "list", "tables"}, ofMinicri})
	}
	for _, list := range lists {
		if err := s.addRuleList(ctx, list); err != nil {
			return err
		}
	}
	return nil
}

func (s Snapshot) addRuleList(ctx context.Context, list ruleList) error {
	tool := list.command[0]
	rules, err := exec.CommandContext(ctx, tool, list.command[1:]...).Output()
	// The plugins run the same program: where it is missing they made no rules.
	if errors.Is(err, exec.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("listing rules with %s: %w", tool, err)
	}
	for line := range strings.Lines(string(rules)) {
		if line = strings.TrimSpace(line); list.ours(line) {
			s.add(Rule, line, tool, "")
		}
	}
	return nil
}

func ofMinicri(line string) bool { return strings.HasPrefix(line, "table inet minicri-") }

// ofAttachment tells the lines of iptables-save that plugins remove with
// DEL: the chains of an attachment, what jumps to them, and what the firewall
// plugin puts into the chain that all share.
func ofAttachment(line string) bool {
	if strings.HasPrefix(line, "-A CNI-FORWARD ") {
		return !strings.HasSuffix(line, "-j CNI-ADMIN")
	}
	return attachmentChain.MatchString(line)
}

// ofAttachmentNft tells the rules that plugins with the nftables backend take
// back with DEL: they end in a comment that names the container. A table's or
// chain's comment has nothing before it. Rules of iptables-nft are shown here
// too, their chains have been counted already.
func ofAttachmentNft(line string) bool {
	rule, _, found := strings.Cut(line, ` comment "`)
	return found && rule != "" && !attachmentChain.MatchString(line) &&
		(strings.HasSuffix(rule, " masquerade") || strings.Contains(rule, " dnat to "))
}
