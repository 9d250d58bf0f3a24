package starter

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/step/failpoint"
)

// Socket is the descriptor over which a starter gets its request.
const Socket = 3

// Engine does what requests ask for, in a starter.
type Engine interface {
	// Do answers a request. undo takes back what it has made; it is called when the
	// supervisor does not take it, because it has ended.
	Do(request Request, files []*os.File) (answer Answer, undo func() error)
}

// Serve is all of a starter's life: it waits for its request, has the engine do it,
// answers, and returns when the supervisor has taken what was made.
func Serve(engine Engine) error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become a sub-reaper: %w", os.NewSyscallError("prctl", err))
	}
	unix.CloseOnExec(Socket)
	socket := os.NewFile(Socket, "socket")
	conn, err := net.FileConn(socket)
	if err := errors.Join(err, socket.Close()); err != nil {
		return fmt.Errorf("the socket of a starter: %w", err)
	}
	supervisor := conn.(*net.UnixConn)
	var request Request
	files, err := receive(supervisor, &request)
	if errors.Is(err, io.EOF) {
		return nil // it is not needed
	}
	if err != nil {
		return fmt.Errorf("read what to start: %w", err)
	}
	if err := failpoint.Hit("starter/asked"); err != nil {
		return err
	}
	answer, undo := engine.Do(request, files)
	closeAll(files)
	if answer.Err() != nil {
		endChildren()
	}
	if err = failpoint.Hit("starter/made"); err == nil {
		err = send(supervisor, answer, nil)
	}
	if err == nil {
		err = failpoint.Hit("starter/answered")
	}
	if err == nil && answer.Err() == nil {
		_, err = io.ReadFull(supervisor, make([]byte, len(taken)))
	}
	if err != nil && undo != nil {
		err = errors.Join(err, undo())
	}
	return err
}

// endChildren ends what a program has left that did not do what it was asked for: the
// starter is a sub-reaper, so all of it is below.
func endChildren() {
	for _, child := range process.Children("self") {
		process.KillTree(child)
	}
}

// taken is what the supervisor says when it has taken over what was made.
const taken = "taken"
