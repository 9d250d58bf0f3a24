// Package client is the daemon's side of a supervisor (minicri-shim serve): it starts the process, speaks its
// protocol and maps its errors to errdefs kinds. ErrLost says that the connection is gone, and
// errdefs.ErrUnavailable of Connect that none serves: Start another one on its directory, which adopts the
// containers. A Set replaces the node's supervisors that die.
//
// Many goroutines may use a Client. Its calls share one connection, but those that last have one of their own: an
// exec's start, its streams and the wait for it (but not that of ExecEnd), the events, and the question whether the
// supervisor hangs.
package client
