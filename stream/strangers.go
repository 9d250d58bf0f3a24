package stream

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// maxStrangers bounds the connections without a token. Every process of the node can make them.
const maxStrangers = 256

// strangers are the connections without a token, the oldest first. One too many ends one of the owner that has most:
// the oldest one that has sent nothing or, if there is none, the oldest. So no user can end the connections of another.
type strangers struct {
	mu    sync.Mutex
	conns []stranger
}

type stranger struct {
	net.Conn
	owner string
}

func (s *strangers) watch(conn net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		if ended := s.add(stranger{conn, ownerOf(tcpOf(conn))}); ended != nil {
			reset(ended)
		}
	case http.StateHijacked, http.StateClosed:
		s.mu.Lock()
		defer s.mu.Unlock()
		s.conns = slices.DeleteFunc(s.conns, func(one stranger) bool { return one.Conn == conn })
	}
}

// add returns the connection that has to end, if any.
func (s *strangers) add(one stranger) net.Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns = append(s.conns, one)
	if len(s.conns) <= maxStrangers {
		return nil
	}
	count := make(map[string]int)
	for _, other := range s.conns {
		count[other.owner]++
	}
	victim := -1
	for i, other := range s.conns {
		more := victim < 0 || count[other.owner] > count[s.conns[victim].owner]
		same := !more && count[other.owner] == count[s.conns[victim].owner]
		if more || same && hasSent(s.conns[victim].Conn) && !hasSent(other.Conn) {
			victim = i
		}
	}
	ended := s.conns[victim].Conn
	s.conns = slices.Delete(s.conns, victim, victim+1)
	return ended
}

// hasSent reports whether the peer has sent a byte, also one that was read since.
func hasSent(conn net.Conn) (sent bool) {
	raw, err := tcpOf(conn).SyscallConn()
	if err != nil {
		return false
	}
	_ = raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		sent = err == nil && info.Bytes_received > 1
	})
	return sent
}

// ownerOf returns the user of the peer on this machine, or its address.
func ownerOf(conn *net.TCPConn) string {
	peer, own := conn.RemoteAddr().(*net.TCPAddr), conn.LocalAddr().(*net.TCPAddr)
	uid, err := userOf(peer, own)
	if err != nil { // such as on another machine, or without inet_diag in the kernel
		return peer.IP.String()
	}
	return uid
}

// userOf returns the user who has the socket with a local and a remote address. It uses sock_diag(7): a request for one
// socket costs the same however many there are. A socket that no process has any more has no user.
func userOf(local, remote *net.TCPAddr) (string, error) {
	const (
		requestSize = 56 // struct inet_diag_req_v2
		answerSize  = 72 // struct inet_diag_msg; it ends with the user and the inode
		uid, inode  = 64, 68
	)
	family, bytes, from, to := unix.AF_INET, 4, local.IP.To4(), remote.IP.To4()
	if from == nil || to == nil {
		family, bytes, from, to = unix.AF_INET6, 16, local.IP.To16(), remote.IP.To16()
	}
	data := make([]byte, requestSize)
	data[0], data[1] = byte(family), unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(data[4:], ^uint32(0)) // any state
	binary.BigEndian.PutUint16(data[8:], uint16(local.Port))
	binary.BigEndian.PutUint16(data[10:], uint16(remote.Port))
	copy(data[12:], from[:bytes])
	copy(data[28:], to[:bytes])
	binary.NativeEndian.PutUint64(data[48:], ^uint64(0)) // no cookie
	request := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, 0)
	request.AddRawData(data)
	answers, err := request.Execute(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY)
	if err != nil {
		return "", err
	}
	if len(answers) != 1 || len(answers[0]) < answerSize {
		return "", fmt.Errorf("%d sockets from %v to %v", len(answers), local, remote)
	}
	if binary.NativeEndian.Uint32(answers[0][inode:]) == 0 {
		return "nobody", nil
	}
	return fmt.Sprint("user ", binary.NativeEndian.Uint32(answers[0][uid:])), nil
}
