package leak

import (
	"cmp"
	"context"
	"fmt"
	"slices"
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

// Snapshot is what was there at one moment. Made by [Take]; the zero value is
// a machine with nothing on it.
type Snapshot struct {
	things map[thing]evidence
}

// thing is the identity of what was found.
type thing struct {
	kind        Kind
	name, where string
}

// evidence is what a thing has besides its identity.
type evidence struct {
	count int
	note  string
}

func (s Snapshot) add(kind Kind, name, where, note string) {
	key := thing{kind, name, where}
	s.things[key] = evidence{s.things[key].count + 1, note}
}

// Count returns how many things of a kind the snapshot has.
func (s Snapshot) Count(kind Kind) int {
	n := 0
	for key, found := range s.things {
		if key.kind == kind {
			n += found.count
		}
	}
	return n
}

// Diff returns what after has more than before, ordered by kind, place and
// name.
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

// Tally returns how many leaks there are of each kind, the kinds without one
// included: a report shows what it looked for.
func Tally(leaks []Leak) map[Kind]int {
	tally := make(map[Kind]int)
	for _, kind := range Kinds() {
		tally[kind] = 0
	}
	for _, l := range leaks {
		tally[l.Kind] += l.Count
	}
	return tally
}

// settleInterval is short against the 2 s after which some inits reap, and
// long against the few milliseconds that a look takes.
const settleInterval = 20 * time.Millisecond

// lastingTime is more than a periodic run of plugins (STATUS) may take.
const lastingTime = 8 * time.Second

// Settle looks again and again until nothing is left that before has not, or
// until ctx ends. It returns what was left then and still is as long after again,
// lastingTime at most: not what comes and goes while something else stays. A ctx
// that ended is no error then. ctx needs a deadline, or a leak makes Settle wait
// forever.
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
			return lasting(ctx, before, leaks, scope)
		case <-time.After(settleInterval):
		}
	}
}

// lasting are those of the leaks that are there now, too.
func lasting(ctx context.Context, before Snapshot, leaks []Leak, scope Scope) ([]Leak, error) {
	after, err := Take(context.WithoutCancel(ctx), scope)
	if err != nil {
		return nil, err
	}
	there := make(map[thing]bool)
	for _, l := range Diff(before, after) {
		there[thing{l.Kind, l.Name, l.Where}] = true
	}
	return slices.DeleteFunc(leaks, func(l Leak) bool { return !there[thing{l.Kind, l.Name, l.Where}] }), nil
}
