package leak

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// isAddress: host-local keeps a file of that name for each address, beside its lock and last_reserved_ip files.
func isAddress(name string) bool {
	_, err := netip.ParseAddr(name)
	return err == nil
}

// addEntries adds the entries of directories whose names are wanted.
func (s Snapshot) addEntries(kind Kind, dirs []string, wanted func(name string) bool) error {
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !gone(err) {
			return err
		}
		for _, entry := range entries {
			if wanted(entry.Name()) {
				s.add(kind, entry.Name(), dir, "")
			}
		}
	}
	return nil
}

// addFiles adds everything below the directories, but what is in those kept.
func (s Snapshot) addFiles(dirs, kept []string) (err error) {
	for _, dir := range dirs {
		err = errors.Join(err, walk(dir, func(path string, entry fs.DirEntry) {
			if path != dir && !slices.Contains(kept, filepath.Dir(path)) {
				s.add(File, path, "", entry.Type().String())
			}
		}))
	}
	return err
}

// walk visits a tree, the root included, and passes over what goes away while it is visited.
func walk(root string, visit func(path string, entry fs.DirEntry)) error {
	return filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if gone(err) {
			return nil
		}
		if err == nil {
			visit(path, entry)
		}
		return err
	})
}

// gone reports that a file is not there any more: a file of a process that is ending answers with ESRCH, a
// cgroup being removed with ENODEV.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENODEV)
}

// attachmentChain matches the chains of one attachment: masquerade's CNI-HASH and portmap's CNI-DN-HASH.
var attachmentChain = regexp.MustCompile(`CNI-(DN-)?[0-9a-f]{16,}`)

// addRules adds chains and rules that CNI plugins made for one attachment. What plugins share stays for good
// after the last DEL and does not count: in iptables the chains CNI-HOSTPORT-*, CNI-FORWARD and CNI-ADMIN, in
// nftables the tables cni_hostport and cni_plugins_masquerade.
func (s Snapshot) addRules(ctx context.Context, scope Scope) (err error) {
	if scope.Rules {
		err = errors.Join(s.addLines(ctx, ofAttachment, "iptables-save"), s.addLines(ctx, ofAttachment, "ip6tables-save"),
			s.addLines(ctx, ofAttachmentNft, "nft", "--stateless", "list", "ruleset"))
	}
	if scope.Tables {
		err = errors.Join(err, s.addLines(ctx, ofMinicri, "nft", "list", "tables"))
	}
	return err
}

// addLines adds those lines of what a program prints that are ours: the rules of the calling thread's network
// namespace.
func (s Snapshot) addLines(ctx context.Context, ours func(line string) bool, tool string, args ...string) error {
	rules, err := exec.CommandContext(ctx, tool, args...).Output()
	// The plugins run the same program: where it is missing they made no rules.
	if err != nil && !errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("listing rules with %s: %w", tool, err)
	}
	for line := range strings.Lines(string(rules)) {
		if line = strings.TrimSpace(line); ours(line) {
			s.add(Rule, line, tool, "")
		}
	}
	return nil
}

func ofMinicri(line string) bool { return strings.HasPrefix(line, "table inet minicri-") }

// ofAttachment tells the lines of iptables-save that plugins remove with DEL: the chains of an attachment,
// what jumps to them, and what the firewall plugin puts into the chain that all share.
func ofAttachment(line string) bool {
	if strings.HasPrefix(line, "-A CNI-FORWARD ") {
		return !strings.HasSuffix(line, "-j CNI-ADMIN")
	}
	return attachmentChain.MatchString(line)
}

// ofAttachmentNft tells the rules that plugins with the nftables backend take back with DEL: they end in a
// comment that names the container. A table's or chain's comment has nothing before it. Rules of iptables-nft
// are shown here too, their chains have been counted already.
func ofAttachmentNft(line string) bool {
	rule, _, found := strings.Cut(line, ` comment "`)
	return found && rule != "" && !attachmentChain.MatchString(line) &&
		(strings.HasSuffix(rule, " masquerade") || strings.Contains(rule, " dnat to "))
}
