package image

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

func TestContainerKeepsItsFilesWhenItsImageGoes(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "used:1", imageOf(t, v1.Config{}, layerOf(t, file("a", "1")), layerOf(t, file("b", "2")))))
	root := mountImage(t, s, image)
	remove(t, s, image.ID)
	if l := collected(t, s); l.snapshots != 3 || l.blobs != 0 {
		t.Errorf("left: %+v, want two layers and the container's", l)
	}
	checkFile(t, filepath.Join(root, "b"), "2")
	pull(t, s, registry.host()+"/used:1") // again, while the container has it
}

func TestSnapshotOfAContainer(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "snap:1", smallImage(t)))
	must(t, s.Prepare(t.Context(), "c1", image.ID, PrepareOptions{}))
	if err := s.Prepare(t.Context(), "c1", image.ID, PrepareOptions{}); !errdefs.IsAlreadyExists(err) {
		t.Errorf("prepared twice: %v", err)
	}
	if err := s.Prepare(t.Context(), "c2", "sha256:0123456789", PrepareOptions{}); !errdefs.IsNotFound(err) {
		t.Errorf("prepared without an image: %v", err)
	}
	s = reopened(t, s)
	if keys, err := s.Snapshots(t.Context()); err != nil || !slices.Equal(keys, []string{"c1"}) {
		t.Errorf("snapshots after a restart: %v, %v", keys, err)
	}
	target := filepath.Join(t.TempDir(), "rootfs")
	must(t, s.Mount(t.Context(), "c1", target, ""))
	checkUsage(t, s, target)
	for range 2 { // both are idempotent
		report(t, s.Unmount(target))
		report(t, s.RemoveSnapshot(t.Context(), "c1"))
	}
	if l := collected(t, s); l.snapshots != 1 {
		t.Errorf("left: %+v", l)
	}
}

// checkUsage writes 1 MiB and ten files and demands to find them.
func checkUsage(t *testing.T, s *Store, target string) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(target, "big"), make([]byte, 1<<20), 0o644))
	for i := range 10 {
		must(t, os.WriteFile(filepath.Join(target, fmt.Sprint(i)), nil, 0o644))
	}
	own, err := s.SnapshotUsage(t.Context(), "c1")
	if err != nil || own.Bytes < 1<<20 || own.Bytes > 2<<20 || own.Inodes < 11 || own.Inodes > 14 || own.Time.IsZero() {
		t.Errorf("container: %+v, %v", own, err)
	}
	all, err := s.ContainerUsage(t.Context())
	if err != nil || all.Bytes != own.Bytes || all.Inodes != own.Inodes || all.Mountpoint != s.Dir() {
		t.Errorf("containers: %+v, %v", all, err)
	}
	images, err := s.ImageUsage(t.Context())
	if err != nil || images.Bytes == 0 || images.Bytes >= 1<<20 || images.Inodes == 0 {
		t.Errorf("images: %+v, %v", images, err)
	}
}

func TestSnapshotForAUserNamespace(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "userns:1", smallImage(t)))
	shift := []IDMap{{HostID: 100000, Size: 65536}}
	target := mountAs(t, s, "shifted", image, PrepareOptions{UIDs: shift, GIDs: shift})
	defer s.Unmount(target)
	info, err := os.Stat(filepath.Join(target, "a"))
	must(t, err)
	if st := info.Sys().(*syscall.Stat_t); st.Uid != 100000 || st.Gid != 100000 {
		t.Errorf("a belongs to %d:%d, want 100000", st.Uid, st.Gid)
	}
}

func TestImageWithoutLayers(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "empty:1", imageOf(t, v1.Config{Cmd: []string{"/x"}})))
	if n := entries(t, mountImage(t, s, image)); n != 0 {
		t.Errorf("%d files in an empty image", n)
	}
}

// What was unmounted is mounted nowhere at once, and not in use once the store
// is closed: the disk below can be unmounted.
func TestCloseEndsWhatWasUnmounted(t *testing.T) {
	disk, registry := t.TempDir(), newTestRegistry(t)
	must(t, unix.Mount("tmpfs", disk, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(disk, unix.MNT_DETACH) })
	s := openStoreAt(t, disk)
	image := pull(t, s, registry.push(t, "gone:1", smallImage(t)))
	for _, key := range []string{"c1", "c2", "c3", "c4"} {
		target := mountAs(t, s, key, image, PrepareOptions{})
		report(t, os.WriteFile(filepath.Join(target, "written"), make([]byte, 1<<20), 0o644))
		report(t, s.Unmount(target))
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil || strings.Contains(string(mounts), target) {
			t.Errorf("%s is still mounted (%v)", target, err)
		}
		report(t, s.RemoveSnapshot(t.Context(), key))
	}
	var behind [2]int
	must(t, unix.Pipe2(behind[:], unix.O_CLOEXEC|unix.O_NONBLOCK))
	t.Cleanup(func() { _ = unix.Close(behind[0]) })
	s.unmounted.Go(func() error { time.Sleep(100 * time.Millisecond); return unix.Close(behind[1]) })
	report(t, s.Close())
	if n, err := unix.Read(behind[0], make([]byte, 1)); n != 0 || err != nil {
		t.Errorf("the store is closed, and what was to be ended before is not: %d, %v", n, err)
	}
	unmountDisk(t, disk)
}
