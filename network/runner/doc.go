// Package runner runs CNI plugins so that it is known which processes belong
// to a run, and how each plugin ended.
//
// A run is one verb over the plugins of one network configuration. It is the Exec
// of libcni (invoke.Exec), so it starts each plugin of the chain:
//
//   - in a cgroup of the run, where everything stays that the plugin starts,
//     whatever environment, session or process group that has;
//   - in a session of its own, so that a signal to its process group reaches no
//     process of another's;
//   - without waiting for who holds its pipes: the run follows the plugin.
//
// A DEL that fails does not end the chain: the other plugins get theirs, and libcni
// hears of the failure from the last one.
//
// # States
//
//	begun --> every plugin has answered --> ended, its cgroup removed
//	  |                                 \-> a process lives on, such as dnsmasq
//	  |--> killed at its limit ----------> ended, its cgroup removed
//	  |                     \-----------> stuck: a process does not go
//	  \--> left by a daemon that ended: found by the next one
//
// A run has no file. The name of its cgroup has the verb, the id and the end of its
// limit, which is all that the next daemon needs to wait for it.
//
// # Locks
//
// Run.mu guards the reports and the process that runs, and is held for moments.
package runner
