// Package runner runs CNI plugins so that it is known which processes belong
// to a run, and how each plugin ended.
//
// A run is one verb over the plugins of one network configuration. It is the Exec
// of libcni (invoke.Exec), so it starts each plugin of the chain in a cgroup of the run,
// where everything stays that the plugin starts, whatever environment, session or process
// group that has; and in a session of its own, so that a signal to its process group
// reaches no process of another's. A DEL that fails does not end the chain: the other
// plugins get theirs, and libcni hears of the failure from the last one.
//
// A run is over when every plugin has answered, or when it is killed. It has no file. The
// name of its cgroup has the verb, the id and the end of its limit, which is all that the
// next daemon needs to wait for one that is not over.
//
// Run.mu guards the reports, and is held for moments.
package runner
