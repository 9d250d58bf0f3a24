// Package runner runs CNI plugins so that it is known which processes belong
// to a run, and how each plugin ended.
//
// A run is one verb over the plugins of one network configuration. go-cni, and
// through CNI_PATH every plugin that runs another one, is given a directory of
// ours instead of the configured ones. In it each plugin is the same small
// program (runner.c), which enters the cgroup of the run, runs the real plugin,
// passes on its answer, and writes a note. So:
//
//   - everything that a run started is in its cgroup, whatever environment,
//     session or process group it has, and nothing else is;
//   - the answer of every plugin of the chain, and of those that they run, is known,
//     over a restart of the daemon too;
//   - a DEL that fails does not end the chain: the other plugins get theirs;
//   - a child that holds a plugin's pipes delays nothing: the program follows
//     the plugin, not its pipes.
//
// # Files
//
// All are in one volatile directory, a tmpfs of its own that does not fill with
// what it is in, but for the program itself, which is kept where programs can be
// executed:
//
//	RUN/           one run:
//	  request.json what is run, for how long, and in which cgroup, for the next daemon
//	  run          what the program has to know: the cgroup, and where plugins are
//	  p            a link to .plugins; go-cni is given it
//	  nK, nI-K     the note of the K-th plugin of the chain, of the K-th that
//	               the plugin of note I has run
//	  eK, eI-K     the end of what that plugin has written to stderr so far, if anything
//	  pK, pI-K     a link to p, which that plugin is given
//	  failed       a plugin of the chain has failed its DEL
//	  done         the run is over, and processes that it left are to live
//	.plugins/NAME  a link to the program, for each plugin that is or was installed,
//	               or was asked for
//
// # States
//
//	begun --> every plugin has answered --> ended, removed
//	  |                                 \-> done: a process lives on, such as dnsmasq
//	  |--> killed at its limit ----------> ended, removed
//	  |                     \-----------> stuck: a process does not go; waited for
//	  \--> left by a daemon that ended: unfinished, for the next one
//
// Processes that a run has left in the background live on if it succeeded, and are
// killed if it failed or was killed.
//
// # Cgroups
//
// Some cgroups are kept for later runs, from Open to Close, because to make
// and to remove one costs more than all the rest; a run that finds none of them
// idle has one of its own.
//
// # Locks
//
// Runner.mu guards the pool of cgroups and what is known of the installed
// plugins; it is held for the time of some system calls. A Run has one owner and no lock.
package runner
