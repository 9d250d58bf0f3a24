// Package client is the daemon's side of a supervisor (minicri-shim serve): it starts the process, speaks its
// protocol and maps its errors to errdefs kinds. errdefs.ErrUnavailable says that a supervisor is gone: Start
// another one on its directory, which adopts the containers. A Set replaces the node's supervisors that die.
//
// Many goroutines may use a Client. It has one connection for control; a start, a stream
// and a wait of an exec, the events and the question whether the supervisor hangs each have their own.
package client
