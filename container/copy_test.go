package container

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// A volume has what the image has in its place, but for devices and sockets.
func TestCopyTree(t *testing.T) {
	source, target := filepath.Join(t.TempDir(), "image"), t.TempDir()
	sparse := source + "/dir/sparse"
	harness.Check(t, errors.Join(
		os.MkdirAll(source+"/dir/empty", 0o700), os.WriteFile(source+"/dir/file", []byte("text"), 0o600),
		os.Chown(source+"/dir/file", 12, 34), os.Chmod(source+"/dir/file", 0o751|os.ModeSetuid),
		unix.Setxattr(source+"/dir/file", "trusted.note", []byte("kept"), 0),
		os.Link(source+"/dir/file", source+"/second"),
		os.Symlink("/nowhere", source+"/link"), os.Lchown(source+"/link", 5, 6),
		unix.Mkfifo(source+"/fifo", 0o640), unix.Mknod(source+"/device", unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))),
		os.WriteFile(sparse, []byte("begin"), 0o644), os.Truncate(sparse, 1<<40), os.Chmod(source, 0o711),
		unix.UtimesNano(source+"/dir", []unix.Timespec{{Sec: 1}, {Sec: 1_000_000_000, Nsec: 5}}),
	))
	harness.Check(t, copyTree(t.Context(), target, source))
	for _, name := range []string{"", "dir", "dir/empty", "dir/file", "second", "link", "fifo", "dir/sparse"} {
		var want, got unix.Stat_t
		err := errors.Join(unix.Lstat(source+"/"+name, &want), unix.Lstat(target+"/"+name, &got))
		same := got.Mode == want.Mode && got.Uid == want.Uid && got.Gid == want.Gid && got.Mtim == want.Mtim &&
			got.Nlink == want.Nlink && (got.Mode&unix.S_IFMT == unix.S_IFDIR || got.Size == want.Size)
		same = same && got.Blocks <= want.Blocks+128
		harness.Want(t, err == nil && same, "%q: %v, got %+v, want %+v", name, err, got, want)
	}
	value := make([]byte, 10)
	n, err := unix.Getxattr(target+"/second", "trusted.note", value)
	harness.Want(t, err == nil && string(value[:n]) == "kept", "the attribute is %q, %v", value[:max(n, 0)], err)
	to, err := os.Readlink(target + "/link")
	harness.Want(t, err == nil && to == "/nowhere", "the link leads to %q, %v", to, err)
	content := make([]byte, 5)
	file, err := os.Open(target + "/dir/sparse")
	harness.Check(t, err)
	_, err = file.Read(content)
	harness.Want(t, errors.Join(err, file.Close()) == nil && string(content) == "begin", "%q, %v", content, err)
	_, err = os.Lstat(target + "/device")
	harness.Want(t, errors.Is(err, os.ErrNotExist), "a device was copied: %v", err)
}

// A small image can have large files: their copies end with the caller, and do not fill the file system.
//
// attack: denial of service: a small image has large files of zeros in a VOLUME
// held: the copy stops when its caller leaves; a twentieth of the disk always stays free
func TestCopyOfLargeFiles(t *testing.T) {
	small := t.TempDir()
	harness.Check(t, unix.Mount("tmpfs", small, "tmpfs", 0, "size=8m"))
	defer unix.Unmount(small, 0)
	source := t.TempDir()
	zeros := []byte(strings.Repeat("\x00", 3<<20))
	for _, name := range []string{"a", "b", "c"} {
		harness.Check(t, os.WriteFile(filepath.Join(source, name), zeros, 0o644))
	}
	err := copyTree(t.Context(), small, source)
	harness.Want(t, errdefs.IsResourceExhausted(err) && strings.Contains(err.Error(), small), "%v", err)
	var disk unix.Statfs_t
	harness.Check(t, unix.Statfs(small, &disk))
	harness.Want(t, disk.Bfree > disk.Blocks/20, "%d of %d blocks are free", disk.Bfree, disk.Blocks)

	left := errors.New("the caller has left")
	ctx, leave := context.WithCancelCause(t.Context())
	leave(left)
	copying := treeCopy{ctx: ctx, buffer: make([]byte, 1)}
	err = copying.file(filepath.Join(t.TempDir(), "a"), filepath.Join(source, "a"), 1<<20)
	harness.Want(t, errors.Is(err, left), "within a file: %v", err)
	harness.Want(t, errors.Is(copyTree(ctx, t.TempDir(), source), left), "between files")
}
