package runtime

import (
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pidfdInfo is struct pidfd_info of linux/pidfd.h, version 0.
type pidfdInfo struct {
	mask     uint64
	cgroupid uint64
	ids      [11]uint32
	exitCode int32
}

const (
	pidfdGetInfo  = 0xC040FF0B // _IOWR(0xFF, 11, struct pidfd_info)
	pidfdInfoExit = 1 << 3
	// exitInfoPatience is for the new parent to reap: only then does the kernel
	// tell (Linux 6.15).
	exitInfoPatience = 2500 * time.Millisecond
)

// exitInfo asks the kernel for the exit status of an ended process that is not
// our child. Older kernels do not tell.
func exitInfo(pidfd int) (status syscall.WaitStatus, known bool) {
	for deadline := time.Now().Add(exitInfoPatience); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		info := pidfdInfo{mask: pidfdInfoExit}
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(pidfd), pidfdGetInfo, uintptr(unsafe.Pointer(&info)))
		if errno == 0 && info.mask&pidfdInfoExit != 0 {
			return syscall.WaitStatus(info.exitCode), true
		}
		if errno == unix.ENOTTY || errno == unix.EINVAL {
			return 0, false
		}
	}
	return 0, false
}
