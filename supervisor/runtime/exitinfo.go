package runtime

import (
	"syscall"
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
)

// exitInfo asks the kernel for the exit status of a process that was reaped.
// Kernels before 6.15 do not tell.
func exitInfo(pidfd int) (status syscall.WaitStatus, known bool) {
	info := pidfdInfo{mask: pidfdInfoExit}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(pidfd), pidfdGetInfo, uintptr(unsafe.Pointer(&info)))
	return syscall.WaitStatus(info.exitCode), errno == 0 && info.mask&pidfdInfoExit != 0
}
