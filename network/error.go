package network

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"github.com/containernetworking/cni/pkg/types"
)

var (
	// ErrNoConfiguration: no file of the configuration directory can be used.
	ErrNoConfiguration = errors.New("no CNI configuration")
	// ErrNoAddress: ADD succeeded but gave eth0 no address.
	ErrNoAddress = errors.New("the CNI result has no address for eth0")
)

// explain adds what libcni leaves out of the text of a plugin's error: the
// error code (CNI SPEC, "Error").
func explain(err error) error {
	var plugin *types.Error
	if !errors.As(err, &plugin) || plugin.Code == 0 {
		return err
	}
	return fmt.Errorf("%w (CNI error code %d)", err, plugin.Code)
}

func inode(info fs.FileInfo) uint64 {
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		return stat.Ino
	}
	return 0
}
