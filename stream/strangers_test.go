package stream

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
)

// A connection that has no token yet is not ended by those that others make.
//
// attack: clients: local users connect to the streaming server in a loop, and send nothing, or a part of a request
// held: at most 256 connections have no token; one too many ends one of the user who has most, a silent one first
// field: containerd's streaming server has no limit
func TestStrangersOfOthers(t *testing.T) {
	const nobody, another = 65534, 1001
	for _, row := range []struct {
		name       string
		address    string
		uid        int // the client
		sends      bool
		others     []int // the users of the other connections, in turn
		othersSend bool
	}{
		{"the client has sent its request, others nothing", "127.0.0.1:0", 0, true, []int{0}, false},
		{"the client has sent nothing yet, another user nothing", "[::1]:0", 0, false, []int{nobody}, false},
		{"the client has sent nothing yet, another user a part", "127.0.0.1:0", 0, false, []int{nobody}, true},
		{"the client is no root, and root sends parts of requests", "[::1]:0", nobody, false, []int{0}, true},
		{"two users send parts of requests", "127.0.0.1:0", 0, false, []int{nobody, another}, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			listener, err := net.Listen("tcp", row.address)
			harness.Check(t, err)
			defer listener.Close()
			s := &strangers{}
			connect := func(uid int, sends bool) net.Conn {
				client, server := connectAs(t, listener, uid)
				if sends {
					_, err := io.WriteString(client, "GET /exec/")
					harness.Check(t, err)
					harness.Eventually(t, "the server's kernel has it", func() bool { return hasSent(server) })
				}
				s.watch(server, http.StateNew)
				return client
			}
			var all []net.Conn
			defer func() {
				for _, conn := range all {
					_ = conn.Close()
				}
			}()
			for i := range maxStrangers - 1 {
				all = append(all, connect(row.others[i%len(row.others)], row.othersSend))
			}
			all = append(all, connect(row.uid, row.sends))
			client := all[len(all)-1]
			for i := range maxStrangers / 4 {
				all = append(all, connect(row.others[i%len(row.others)], row.othersSend))
			}
			harness.Same(t, "connections", len(s.conns), maxStrangers)
			harness.Check(t, client.SetReadDeadline(time.Now()))
			_, err = client.Read(make([]byte, 1))
			harness.Want(t, errors.Is(err, os.ErrDeadlineExceeded), "the client's connection has ended: %v", err)
		})
	}
}

// connectAs connects as a user, and returns both ends.
func connectAs(t *testing.T, listener net.Listener, uid int) (client, server net.Conn) {
	err := process.OnDisposableThread(func() (err error) { // which has the user of its file system calls for itself
		if _, err := unix.SetfsuidRetUid(uid); err != nil {
			return err
		}
		if now, _ := unix.SetfsuidRetUid(-1); now != uid {
			return fmt.Errorf("the user is %d, want %d", now, uid)
		}
		client, err = net.Dial("tcp", listener.Addr().String())
		return err
	})
	harness.Check(t, err)
	server, err = listener.Accept()
	harness.Check(t, err)
	t.Cleanup(func() { _ = server.Close() })
	harness.Same(t, "the owner of a connection", ownerOf(server.(*net.TCPConn)), fmt.Sprint("user ", uid))
	return client, server
}

// The kernel keeps a socket that its process has closed. It is nobody's, not root's.
func TestStrangerWithoutAProcess(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Check(t, err)
	defer listener.Close()
	client, server := connectAs(t, listener, 0)
	harness.Check(t, client.Close())
	harness.Same(t, "owner", ownerOf(server.(*net.TCPConn)), "nobody")
	harness.Want(t, !hasSent(server), "the end of the output counts as a byte")
}
