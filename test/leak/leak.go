// Package leak finds what a runtime left behind.
//
// It asks the machine itself, never the runtime: the kernel by /proc, netlink and cgroup directories, the CNI plugins
// by their files and rules. [Take] writes down what is there within a [Scope], [Diff] returns what one snapshot has
// more than another, and with its arguments exchanged what was lost: something that belonged to another and was
// removed too. [Settle] gives the kernel time for what it removes by itself: zombies, the second end of a veth pair.
//
// Links and rules are those of the calling thread's network namespace, mounts those of its mount namespace: a
// caller who looks into another namespace locks its thread first.
//
// What goes away while it is looked at is not there. What may not be read (on hardened machines the
// namespaces of process 1) cannot be ours and is left out.
package leak

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Kind says what sort of thing was left behind.
type Kind string

// The kinds, in the order in which a report shows them.
const (
	NetnsFile  Kind = "netns file" // a file of a directory of network namespaces
	Namespace  Kind = "namespace"  // a namespace that a process holds
	Mount      Kind = "mount"
	Link       Kind = "link"       // a network interface
	Rule       Kind = "rule"       // an iptables chain or rule, or an nftables rule, of one attachment
	Address    Kind = "address"    // an address that host-local handed out
	Result     Kind = "cni result" // a result that libcni keeps for DEL
	Cgroup     Kind = "cgroup"     // a cgroup directory of one hierarchy
	Process    Kind = "process"    // a process, zombies included
	Descriptor Kind = "descriptor" // an open descriptor of a process
	File       Kind = "file"       // a file or directory of the runtime's state
)

// Kinds lists every kind in the order in which a report shows them.
func Kinds() []Kind {
	return []Kind{NetnsFile, Namespace, Mount, Link, Rule, Address, Result, Cgroup, Process, Descriptor, File}
}

// Leak is something that one snapshot has and another has not.
type Leak struct {
	Kind  Kind
	Name  string // what it is: a path, an interface, an executable
	Where string // where it is: a directory, a hierarchy, a network namespace
	Note  string // what helps to find its maker; two leaks are the same whatever their notes
	Count int    // how many more there are, at least 1
}

// String returns the leak as one line of a report.
func (l Leak) String() string {
	line := fmt.Sprintf("%s %s", l.Kind, l.Name)
	if l.Count > 1 {
		line = fmt.Sprintf("%d x %s", l.Count, line)
	}
	if l.Where != "" {
		line += " in " + l.Where
	}
	if l.Note != "" {
		line += " (" + l.Note + ")"
	}
	return line
}

// Snapshot is what was there at one moment. Made by [Take]; the zero value is a machine with nothing on it.
type Snapshot struct {
	things map[thing]evidence
}

// thing is the identity of what was found.
type thing struct {
	kind        Kind
	name, where string
}

func (l Leak) thing() thing { return thing{l.Kind, l.Name, l.Where} }

type evidence struct {
	count int
	note  string
}

func (s Snapshot) add(kind Kind, name, where, note string) {
	key := thing{kind, name, where}
	s.things[key] = evidence{s.things[key].count + 1, note}
}

// Diff returns what after has more than before, ordered by kind, place and name.
func Diff(before, after Snapshot) []Leak {
	var leaks []Leak
	for key, found := range after.things {
		if more := found.count - before.things[key].count; more > 0 {
			leaks = append(leaks, Leak{key.kind, key.name, key.where, found.note, more})
		}
	}
	slices.SortFunc(leaks, func(a, b Leak) int {
		return cmp.Or(
			cmp.Compare(slices.Index(Kinds(), a.Kind), slices.Index(Kinds(), b.Kind)),
			cmp.Compare(a.Where, b.Where),
			cmp.Compare(a.Name, b.Name))
	})
	return leaks
}

// Tally returns how many leaks there are of each kind.
func Tally(leaks []Leak) map[Kind]int {
	tally := make(map[Kind]int)
	for _, l := range leaks {
		tally[l.Kind] += l.Count
	}
	return tally
}

// settleInterval is short against the 2 s after which some inits reap, and long against the few milliseconds
// that a look takes.
const settleInterval = 20 * time.Millisecond

// lastingTime is more than a periodic run of plugins (STATUS) may take.
const lastingTime = 8 * time.Second

// Settle looks again and again until nothing is left that before has not, or until ctx ends. It returns what was left
// then and still is as long after again, lastingTime at most: not what comes and goes while something else stays. A
// ctx that ended is no error then. ctx needs a deadline, or a leak makes Settle wait forever.
func Settle(ctx context.Context, before Snapshot, scope Scope) ([]Leak, error) {
	for began := time.Now(); ; {
		// A look that has begun is finished: the answer must not be cut short.
		after, err := Take(context.WithoutCancel(ctx), scope)
		if err != nil {
			return nil, err
		}
		leaks := Diff(before, after)
		if len(leaks) == 0 {
			return nil, nil
		}
		select {
		case <-ctx.Done():
			time.Sleep(min(time.Since(began), lastingTime))
			if after, err = Take(context.WithoutCancel(ctx), scope); err != nil {
				return nil, err
			}
			now := Diff(before, after)
			return slices.DeleteFunc(leaks, func(l Leak) bool {
				return !slices.ContainsFunc(now, func(n Leak) bool { return n.thing() == l.thing() })
			}), nil
		case <-time.After(settleInterval):
		}
	}
}

// Scope says where [Take] looks. What is left empty is not looked at; a directory that does not exist holds nothing.
type Scope struct {
	// NetnsDirs are directories whose files are network namespaces, such as /run/netns. A file whose mount is
	// gone counts too.
	NetnsDirs []string

	// Namespaces are namespace types by their names in /proc/PID/ns, such as "net". Counted are all that a
	// thread or a descriptor of any process in sight holds: on a machine that does other work too, look from
	// a process namespace of one's own.
	Namespaces []string

	Mounts []string // path prefixes, "/" for all; symbolic links are not followed
	Links  bool     // the network interfaces

	// Rules asks for the iptables and nftables rules that CNI plugins make for one attachment, without the
	// chains and tables that they share and never remove. Tables asks for minicri's own, which it has while
	// its embedded network is in use.
	Rules, Tables bool

	// AddressDirs are host-local's directories of one network each: its dataDir and the network's name, such
	// as /var/lib/cni/networks/NAME.
	AddressDirs []string

	// ResultDirs are directories where libcni keeps results, such as /var/lib/cni/results. Networks, when not
	// empty, limits them to the networks of these names.
	ResultDirs, Networks []string

	// Cgroups are paths below the root of a hierarchy, such as /minicri. They and what is below them counts,
	// in every mounted hierarchy.
	Cgroups []string

	// A process counts when its executable or its command is one of Executables (a zombie has a command only,
	// of at most 15 bytes, and so has libcontainer's init: "runc:[2:INIT]"), when it descends from one of
	// Ancestors, or when its arguments, its environment or its cgroups have one of Marks, texts that are in
	// nothing else. Except are processes that never count.
	Executables       []string
	Marks             []string
	Ancestors, Except []int

	// Descriptors are processes whose open descriptors count, sockets and pipes by number. KeptDescriptors
	// are targets that do not, such as a file that a library opens when it is first used, and keeps.
	Descriptors     []int
	KeptDescriptors []string

	// StateDirs are directories whose files and directories count. KeptDirs are among them, and what is in
	// them does not count: they are bounded, and kept on purpose.
	StateDirs, KeptDirs []string
}

// Take looks at everything within the scope. An error means that a place could not be looked at, so the
// snapshot would say less than it seems to. ctx ends the programs that list rules.
func Take(ctx context.Context, scope Scope) (Snapshot, error) {
	s := Snapshot{things: make(map[thing]evidence)}
	s.addDescriptors(scope.Descriptors, scope.KeptDescriptors)
	for kind, err := range map[Kind]error{
		NetnsFile: s.addEntries(NetnsFile, scope.NetnsDirs, func(string) bool { return true }),
		Namespace: s.addNamespaces(scope.Namespaces),
		Mount:     s.addMounts(scope.Mounts),
		Link:      s.addLinks(scope.Links),
		Rule:      s.addRules(ctx, scope),
		Address:   s.addEntries(Address, scope.AddressDirs, isAddress),
		Result: s.addEntries(Result, scope.ResultDirs, func(name string) bool { // NETWORK-CONTAINER-INTERFACE
			ours := func(network string) bool { return strings.HasPrefix(name, network+"-") }
			return len(scope.Networks) == 0 || slices.ContainsFunc(scope.Networks, ours)
		}),
		Cgroup:  s.addCgroups(scope.Cgroups),
		Process: s.addProcesses(scope),
		File:    s.addFiles(scope.StateDirs, scope.KeptDirs),
	} {
		if err != nil {
			return Snapshot{}, fmt.Errorf("looking for leaks of kind %s: %w", kind, err)
		}
	}
	return s, nil
}
