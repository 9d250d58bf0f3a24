// Package api is the protocol between minicri and a supervisor, which is
// minicri-shim serve.
//
// Control is ttrpc on DIR/shim.sock (shim.proto). Data is plain bytes on
// DIR/stream.sock, one connection per stream:
//
//	client     -> {"container":"ID","exec":"EXEC","stream":"stdin"}\n
//	supervisor -> {}\n or {"error":"..."}\n
//	then bytes, to the supervisor for stdin, to the client for stdout and stderr
//
// The supervisor ends an output stream when its process has ended and what it wrote
// is delivered, or all its writers have closed it. Half-closing a stdin stream
// closes the stdin of an exec, and of a container with stdin_once. An empty
// exec is the container itself: what it writes from then on.
package api

import (
	"path/filepath"
)

// Ready is what a supervisor says to the process that starts it once it serves; all
// else is why it does not.
const Ready = "ready\n"

// Names of streams in a StreamRequest.
const (
	Stdin  = "stdin"
	Stdout = "stdout"
	Stderr = "stderr"
)

// StreamRequest opens a stream: the first line on a stream connection.
type StreamRequest struct {
	Container string `json:"container"`
	Exec      string `json:"exec,omitempty"`
	Stream    string `json:"stream"`
}

// StreamResponse answers a StreamRequest.
type StreamResponse struct {
	Error string `json:"error,omitempty"`
}

// ExitRecord is the content of ExitDir/ID.json: written before the event goes
// out, so that the facts outlive daemon and supervisor.
type ExitRecord struct {
	Code       int32 `json:"code"`       // 128 + signal if killed by one
	CodeKnown  bool  `json:"code_known"` // false if the exit status is lost
	OOMKilled  bool  `json:"oom_killed"`
	FinishedAt int64 `json:"finished_at"` // unix nanoseconds
	PID        int   `json:"pid"`
	// StartError says why the program was never executed; "" if it was.
	StartError string `json:"start_error,omitempty"`
}

// PathGuard stands in the path of a log between what belongs to the owner of the
// node and what others may write, such as a log agent that has /var/log/pods
// mounted. To everybody else it means nothing (path_resolution(7)).
const PathGuard = "/./"

// GuardedPath is the path of name in base. A log that is opened by it is below
// base and behind no symbolic link there; base itself may have some.
func GuardedPath(base, name string) string {
	return filepath.Clean(base) + PathGuard + filepath.Clean(name)
}
