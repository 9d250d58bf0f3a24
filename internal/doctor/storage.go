package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"
)

// What is free below this is a problem: a pod's records, logs and layers do not fit.
const (
	leastBytes  = 64 << 20
	leastInodes = 1024
)

// scarcePercent is what the kubelet evicts pods at, unless it is told otherwise.
const scarcePercent = 5

// storage looks at the file systems of the daemon's directories.
func (c *checker) storage() {
	c.fileSystem("root", c.Config.Root)
	c.fileSystem("state", c.Config.State)
}

func (c *checker) fileSystem(key, path string) {
	var found unix.Statfs_t
	err := unix.Statfs(path, &found)
	for errors.Is(err, fs.ErrNotExist) && path != "/" { // made by the daemon
		path = filepath.Dir(path)
		err = unix.Statfs(path, &found)
	}
	if err != nil {
		c.add(key, Problem, fmt.Sprintf("%s: %v", path, err), "repair the disk, or set "+key+" to another directory")
		return
	}
	if name := noLayers[found.Type]; name != "" && key == "root" {
		c.add(key, Problem, fmt.Sprintf("%s is on %s, on which the kernel mounts no layers of containers", path, name),
			"mount a disk or a volume there, of ext4 or xfs, or set root to a directory of one")
	}
	size := uint64(found.Bsize)
	c.free(key, path, "bytes", found.Bavail*size, found.Blocks*size, leastBytes, func(n uint64) string { return units.BytesSize(float64(n)) })
	if found.Files > 0 { // btrfs has no number of inodes
		c.free(key, path, "inodes", found.Ffree, found.Files, leastInodes, func(n uint64) string { return fmt.Sprint(n) })
	}
}

// noLayers are file systems that cannot have the upper directory of an overlay.
var noLayers = map[int64]string{unix.OVERLAYFS_SUPER_MAGIC: "an overlay", unix.NFS_SUPER_MAGIC: "NFS", unix.MSDOS_SUPER_MAGIC: "FAT"}

func (c *checker) free(key, path, what string, free, all, least uint64, show func(uint64) string) {
	message := fmt.Sprintf("%s of %s %s are free in the file system of %s", show(free), show(all), what, path)
	advice := "remove what is not needed: 'minicri image ls' lists images; the kubelet evicts pods"
	switch {
	case free < least:
		c.add(key, Problem, message+": neither a pod nor an image fits", advice)
	case free < all/100*scarcePercent:
		c.add(key, Warning, message, advice)
	default:
		c.add(key, Good, message, "")
	}
}
