package engine

import "golang.org/x/sys/unix"

// canJoinSessionKeyring tries whether processes may have a session keyring of
// their own. Where they may not (no keyrings, seccomp of an outer container, a
// used-up quota), libcontainer's attempt would fail the whole container.
//
// The try leaves the calling thread in a new, empty, anonymous keyring.
func canJoinSessionKeyring() bool {
	const anonymous = 0
	_, _, errno := unix.RawSyscall(unix.SYS_KEYCTL, unix.KEYCTL_JOIN_SESSION_KEYRING, anonymous, 0)
	return errno == 0
}
