package leak

import (
	"context"
	"fmt"
)

// Scope says where [Take] looks. What is left empty is not looked at; a
// directory that does not exist holds nothing.
type Scope struct {
	// NetnsDirs are directories whose files are network namespaces, such as
	// /run/netns. A file whose mount is gone counts too.
	NetnsDirs []string

	// Namespaces are namespace types by their names in /proc/PID/ns, such as
	// "net" and "user". Counted are all that a thread or a descriptor of any
	// process in sight holds: on a machine that does other work too, look
	// from a process namespace of one's own.
	Namespaces []string

	// Mounts are path prefixes, "/" for all. Symbolic links are not followed.
	Mounts []string

	// Links asks for the network interfaces.
	Links bool

	// Rules asks for the iptables and nftables rules that CNI plugins make for
	// one attachment. The chains and tables that they share and never remove
	// do not count.
	Rules bool

	// Tables asks for the nftables tables of minicri itself, which it has while its
	// embedded network is in use.
	Tables bool

	// AddressDirs are host-local's directories of one network each: its
	// dataDir and the network's name, such as /var/lib/cni/networks/NAME.
	AddressDirs []string

	// ResultDirs are directories where libcni keeps results, such as
	// /var/lib/cni/results. Networks, when not empty, limits them to the
	// networks of these names.
	ResultDirs []string
	Networks   []string

	// Cgroups are paths below the root of a hierarchy, such as /minicri. They
	// and what is below them counts, in every mounted hierarchy.
	Cgroups []string

	// Executables are names of programs. A process counts when its executable
	// or its command has one of them. A zombie has a command only, of at most
	// 15 bytes, and so has libcontainer's init: "runc:[2:INIT]".
	Executables []string

	// Ancestors are process ids whose descendants count, they themselves not.
	Ancestors []int

	// Marks are texts that are in nothing else. A process counts when its
	// arguments, its environment or its cgroups have one of them: so it can be
	// told from those of others that run the same programs. Arguments and
	// environment of a zombie are empty.
	Marks []string

	// Except are the ids of processes that never count.
	Except []int

	// Descriptors are the ids of processes whose open descriptors count.
	// Sockets and pipes count by number: theirs have no lasting names.
	Descriptors []int

	// KeptDescriptors are targets that do not count, such as a file that a
	// library opens when it is first used, and keeps.
	KeptDescriptors []string

	// StateDirs are directories whose files and directories count.
	StateDirs []string
	// KeptDirs are among them, and what is in them does not count: they are
	// bounded, and kept on purpose.
	KeptDirs []string
}

// Take looks at everything within the scope. An error means that a place could
// not be looked at, so the snapshot would say less than it seems to. ctx ends
// the programs that list rules.
func Take(ctx context.Context, scope Scope) (Snapshot, error) {
	s := Snapshot{things: make(map[thing]evidence)}
	looks := map[Kind]func() error{
		NetnsFile:  func() error { return s.addNetnsFiles(scope.NetnsDirs) },
		Namespace:  func() error { return s.addNamespaces(scope.Namespaces) },
		Mount:      func() error { return s.addMounts(scope.Mounts) },
		Link:       func() error { return s.addLinks(scope.Links) },
		Rule:       func() error { return s.addRules(ctx, scope) },
		Address:    func() error { return s.addAddresses(scope.AddressDirs) },
		Result:     func() error { return s.addResults(scope.ResultDirs, scope.Networks) },
		Cgroup:     func() error { return s.addCgroups(scope.Cgroups) },
		Process:    func() error { return s.addProcesses(scope) },
		Descriptor: func() error { return s.addDescriptors(scope.Descriptors, scope.KeptDescriptors) },
		File:       func() error { return s.addFiles(scope.StateDirs, scope.KeptDirs) },
	}
	for _, kind := range Kinds() {
		if err := looks[kind](); err != nil {
			return Snapshot{}, fmt.Errorf("looking for leaks of kind %s: %w", kind, err)
		}
	}
	return s, nil
}
