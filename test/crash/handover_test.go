package crash

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A daemon that is killed while it starts a process leaves its socket and its
// locks open in that process, up to the execve. The next daemon waits for that.
func TestStartWhileAnotherProcessHoldsSocketAndLocks(t *testing.T) {
	n := newNode(t)
	w := n.runWitness(t)
	n.Kill()
	const held = 300 * time.Millisecond
	check(t, os.Remove(n.Socket))
	listener, err := net.Listen("unix", n.Socket)
	check(t, err)
	began := time.Now()
	time.AfterFunc(held, func() { listener.Close() })
	lock, err := os.OpenFile(filepath.Join(n.Root, "lock"), os.O_RDWR, 0)
	check(t, err)
	check(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB))
	time.AfterFunc(2*held, func() { lock.Close() })

	n.Start()
	if took := time.Since(began); took < 2*held {
		t.Errorf("the daemon serves after %v, while its directory was locked", took)
	}
	(&trial{node: n, witness: w}).checkWitness(t)
}
