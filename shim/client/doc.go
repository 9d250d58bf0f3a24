// Package client is the daemon's side of a pod's minicri-shim: it starts the
// process, speaks its protocol and maps its errors to errdefs kinds. A shim
// that is gone is errdefs.ErrUnavailable: Start another one on the same
// directory, it adopts the containers.
//
// A Client may be used by many goroutines. It holds one connection for control;
// execs and events have one each, so that closing it ends the one thing.
package client
