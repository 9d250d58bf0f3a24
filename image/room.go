package image

import (
	"archive/tar"
	"context"
	"fmt"
	"math"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// checkRoom refuses an image before its first layer is fetched if the blobs that are missing above the topmost
// unpacked layer do not fit. What layers take unpacked is not known yet.
func (s *Store) checkRoom(ctx context.Context, layers []ocispec.Descriptor, diffIDs []digest.Digest) error {
	chain, needed := identity.ChainIDs(slices.Clone(diffIDs)), int64(0)
	missing := map[digest.Digest]bool{}
	for i, layer := range slices.Backward(layers) {
		_, err := s.snapshots.Stat(ctx, chain[i].String())
		if err == nil {
			break
		}
		if errdefs.IsNotFound(err) {
			_, err = s.content.Info(ctx, layer.Digest)
		}
		switch {
		case errdefs.IsNotFound(err) && !missing[layer.Digest]:
			missing[layer.Digest] = true
			needed += min(layer.Size, math.MaxInt64-needed)
		case err != nil && !errdefs.IsNotFound(err):
			return fmt.Errorf("look for layer %s: %w", layer.Digest, err)
		}
	}
	return s.checkFree(needed, " for its layers")
}

func (s *Store) checkFree(needed int64, what string) error {
	disk, err := s.room.look()
	if err == nil && needed > disk.bytes {
		err = fmt.Errorf("%d bytes are needed%s, %d are free on the filesystem of the images: %w", needed, what, disk.bytes, errdefs.ErrResourceExhausted)
	}
	return err
}

// room is what all layers that are being unpacked may take of the store's file system.
type room struct {
	dir string

	mu      sync.Mutex // guards writing
	writing int64      // bytes of the files that are being written
}

// free is what a file system has left (statvfs(3), f_bavail), and the part of that which layers leave to others.
type free struct{ bytes, inodes, bytesReserve, inodesReserve int64 }

// A reservePart of the file system stays free, at most maxReserve: a full disk fails all of the node.
const (
	reservePart = 20
	maxReserve  = 1 << 30
)

func (r *room) look() (free, error) {
	var disk unix.Statfs_t
	if err := unix.Statfs(r.dir, &disk); err != nil {
		return free{}, fmt.Errorf("measure the free space of %s: %w", r.dir, err)
	}
	f := free{bytes: int64(disk.Bavail) * disk.Bsize, inodes: math.MaxInt64}
	f.bytesReserve = min(int64(disk.Blocks)*disk.Bsize/reservePart, maxReserve)
	if disk.Files > 0 { // btrfs makes them as it goes, and says 0
		f.inodes, f.inodesReserve = int64(disk.Ffree), int64(disk.Files)/reservePart
	}
	return f, nil
}

// Bytes of memory that a layer takes until it is unpacked.
const (
	maxIndex      = 128 << 20 // names and attributes, of a million files
	headerCost    = 64        // the rest of an entry
	directoryCost = 1 << 10   // of a directory, whose header is kept
)

// Bytes of a plain layer that are in no file: headers, and what is behind the archive's end.
const (
	maxUnwritten = 512 << 20
	maxBehind    = 16 << 20 // builders fill up the last block of an archive
	maxHeader    = 4 << 10  // on average, with the records of pax(1)
	gnuSparse    = 'S'      // a regular file in an old form of GNU's
	contiguous   = '7'      // one that other systems had
)

// allowance is what one layer may take. It is asked before each file is written: a few bytes of a layer can stand for
// a file of any size.
type allowance struct {
	room    *room
	writing int64 // of room.writing
	index   int64
	entries int64
	written int64 // bytes of all files so far, also of those that were replaced
	most    int64 // for written: what was free at the beginning
	end     int64 // of the archive in the plain bytes; 0 before it was read
}

func (r *room) allow() (*allowance, error) {
	disk, err := r.look()
	return &allowance{room: r, most: disk.bytes - disk.bytesReserve}, err
}

// read refuses a layer whose plain bytes go on without files: decompressing them costs time that nothing else bounds.
func (a *allowance) read(at int64) error {
	if behind := at - a.end; a.end > 0 && behind > maxBehind {
		return fmt.Errorf("it has more than %d MiB behind the end of its archive: %w", maxBehind>>20, errdefs.ErrInvalidArgument)
	}
	if rest := at - a.written; rest > maxUnwritten+a.entries*maxHeader {
		return fmt.Errorf("it has %d bytes that are in none of its %d files: %w", rest, a.entries, errdefs.ErrInvalidArgument)
	}
	return nil
}

func (a *allowance) take(header *tar.Header) error {
	if header.Typeflag == gnuSparse || header.Typeflag == contiguous {
		header.Typeflag = tar.TypeReg
	}
	if err := a.keep(header); err != nil {
		return err
	}
	disk, err := a.room.look()
	if err != nil {
		return err
	}
	size := int64(0)
	if header.Typeflag == tar.TypeReg && !strings.HasPrefix(path.Base(header.Name), whiteout) {
		size = header.Size
	}
	left := min(disk.bytes-disk.bytesReserve-a.write(size), a.most-a.written)
	switch {
	case size > left:
		return fmt.Errorf("%q has %d bytes, and layers may take %d more: %d are free on the filesystem of the images, of which %d stay free: %w",
			cut(header.Name, 100), size, max(left, 0), disk.bytes, disk.bytesReserve, errdefs.ErrResourceExhausted)
	case disk.inodes <= disk.inodesReserve:
		return fmt.Errorf("it has too many files: %d inodes are free on the filesystem of the images, of which %d stay free: %w",
			disk.inodes, disk.inodesReserve, errdefs.ErrResourceExhausted)
	}
	a.written += size
	a.entries++
	return nil
}

// write notes the size of the file that is being written, 0 at the end, and returns what other layers are writing.
func (a *allowance) write(size int64) (others int64) {
	a.room.mu.Lock()
	defer a.room.mu.Unlock()
	others = a.room.writing - a.writing
	a.room.writing += size - a.writing
	a.writing = size
	return others
}

// keep counts what memory keeps of an entry. It drops the header's records (pax(1)), up to 1 MiB each, that are no
// extended attributes.
func (a *allowance) keep(header *tar.Header) error {
	for key := range header.PAXRecords {
		if !strings.HasPrefix(key, "SCHILY.xattr.") {
			delete(header.PAXRecords, key)
		}
	}
	a.index += headerCost + int64(len(header.Name)+len(header.Linkname))
	if header.Typeflag == tar.TypeDir {
		a.index += directoryCost
		for key, value := range header.PAXRecords {
			a.index += int64(len(key) + len(value))
		}
	}
	if a.index > maxIndex {
		return fmt.Errorf("the names and attributes of its files are more than %d MiB: %w", maxIndex>>20, errdefs.ErrInvalidArgument)
	}
	return nil
}
