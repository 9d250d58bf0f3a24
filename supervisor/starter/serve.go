package starter

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/internal/step/failpoint"
)

// Socket is the descriptor over which a starter gets its request.
const Socket = 3

// Serve is all of a starter's life: it waits for its request, does it, answers, and
// returns when the supervisor has taken what was made. undo takes back what was made; it
// is called when the supervisor does not take it, because it has ended.
func Serve(do func(request Request, files []*os.File) (answer Answer, undo func() error, err error)) error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become a sub-reaper: %w", os.NewSyscallError("prctl", err))
	}
	unix.CloseOnExec(Socket)
	supervisor, err := socket.Conn(os.NewFile(Socket, "socket"))
	if err != nil {
		return fmt.Errorf("the socket of a starter: %w", err)
	}
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
	answer, undo, failed := do(request, files)
	closeAll(files)
	if failed != nil {
		endChildren()
		answer, undo = answerOf(failed), nil
	}
	if err = failpoint.Hit("starter/made"); err == nil {
		err = send(supervisor, answer, nil)
	}
	if err == nil {
		err = failpoint.Hit("starter/answered")
	}
	if err == nil && failed == nil {
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
