package engine

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/minicri/minicri/test/harness"
)

// A create that fails when its supervisor has ended undoes what it made: the next supervisor may have removed the
// container before it was.
func TestFailedCreateOfADeadSupervisor(t *testing.T) {
	const as = "MINICRI_TEST_UNDONE"
	if undone := os.Getenv(as); undone != "" { // the starter
		err := serve(func(starter.Request, []*os.File) (starter.Answer, func() error, error) {
			_, err := os.Stdin.Read(make([]byte, 1)) // the supervisor is dead
			return starter.Answer{}, func() error { return os.WriteFile(undone, nil, 0o600) }, errors.Join(err, errors.New("failed"))
		})
		harness.WantError(t, err, "pipe")
		return
	}
	conn, theirs, err := socket.Pair()
	harness.Check(t, err)
	undone := filepath.Join(t.TempDir(), "undone")
	command := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$")
	command.Env, command.ExtraFiles = append(os.Environ(), as+"="+undone), []*os.File{theirs}
	stdin, err := command.StdinPipe()
	harness.Check(t, errors.Join(err, command.Start(), theirs.Close()))
	harness.Check(t, errors.Join(socket.SendMessage(conn, starter.Request{Verb: starter.Create}), conn.Close(), stdin.Close()))
	harness.Check(t, command.Wait())
	_, err = os.Stat(undone)
	harness.Check(t, err)
}
