// Package client is the daemon's side of a supervisor (minicri-shim serve): it starts the process, speaks its
// protocol and maps its errors to errdefs kinds. ErrLost says that the connection is gone, and
// errdefs.ErrUnavailable of Connect that none serves: Start another one on its directory, which adopts the
// containers. A Set replaces the node's supervisors that die.
//
// Many goroutines may use a Client. It has one connection for control; a start, a stream and a wait of an exec (but
// that of ExecEnd), the events and the question whether the supervisor hangs each have their own.
package client
