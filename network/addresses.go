package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// LostAddress is an address that the IPAM plugin host-local holds for no attachment.
type LostAddress struct {
	Network, Address, ID string
	file, cache          string
}

// settleLimit is how old a reservation has to be before it is freed: another runtime may be in the middle of its ADD,
// which has no result yet.
const settleLimit = 15 * time.Second

// LostAddresses returns the addresses of a network whose container nobody has: no attachment of ours, and no result of
// another runtime's ADD in libcni's cache. GC frees them since CNI 1.1 only.
func LostAddresses(config []byte, cacheDir string, known func(id string) bool) (lost []LostAddress, err error) {
	const usual = "/var/lib/cni/networks"
	var list struct {
		Name    string
		Plugins []struct {
			IPAM struct{ Type, DataDir string }
		}
	}
	if err := json.Unmarshal(config, &list); err != nil {
		return nil, fmt.Errorf("look for lost addresses: %w", err)
	}
	for _, plugin := range list.Plugins {
		if plugin.IPAM.Type != "host-local" {
			continue
		}
		dir := plugin.IPAM.DataDir
		if dir == "" {
			dir = usual
		}
		dir = filepath.Join(dir, list.Name)
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return lost, fmt.Errorf("look for lost addresses of network %q: %w", list.Name, err)
		}
		for _, entry := range entries {
			a := LostAddress{Network: list.Name, Address: entry.Name(), file: filepath.Join(dir, entry.Name())}
			if _, err := netip.ParseAddr(a.Address); err != nil {
				continue // the plugin's lock, or its last address
			}
			a.ID = holder(a.file)
			a.cache = CachePath(cacheDir, list.Name, a.ID)
			if a.ID != "" && !known(a.ID) && !a.hasResult() {
				lost = append(lost, a)
			}
		}
	}
	return lost, nil
}

// holder returns the container that has an address: the first line of its file.
func holder(file string) string {
	data, _ := os.ReadFile(file) // removed at the same time
	id, _, _ := strings.Cut(string(data), "\n")
	return strings.TrimSpace(id)
}

// hasResult reports whether an ADD of the container has succeeded, for any interface.
func (a *LostAddress) hasResult() bool {
	results, err := filepath.Glob(strings.TrimSuffix(a.cache, eth0) + "*")
	return err != nil || len(results) > 0
}

// Settled reports whether the reservation is old enough to be freed.
func (a *LostAddress) Settled() bool {
	info, err := os.Stat(a.file)
	return err != nil || time.Since(info.ModTime()) >= settleLimit
}

// Free frees the address, with the plugin's lock. It waits until the reservation is old enough.
func (a *LostAddress) Free() error {
	for !a.Settled() {
		time.Sleep(settleLimit / 15)
	}
	lock, err := os.OpenFile(filepath.Join(filepath.Dir(a.file), "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return fmt.Errorf("free the address %s of network %q: %w", a.Address, a.Network, err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("free the address %s of network %q: lock: %w", a.Address, a.Network, err)
	}
	if holder(a.file) != a.ID || a.hasResult() {
		return nil // another container has it by now
	}
	if err := os.Remove(a.file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("free the address %s of network %q: %w", a.Address, a.Network, err)
	}
	return nil
}

// freeLost frees the lost addresses of a network whose plugins do not do so by GC.
func (n *CNI) freeLost(c *Configuration, valid []string) {
	var list struct{ DisableGC any }
	_ = json.Unmarshal(c.Bytes, &list) // go-cni reports what cannot be decoded
	if list.DisableGC == true || strings.EqualFold(fmt.Sprint(list.DisableGC), "true") {
		return
	}
	known := make(map[string]bool)
	for _, id := range append(valid, n.ids()...) {
		known[id] = true
	}
	lost, err := LostAddresses(c.Bytes, n.options.CacheDir, func(id string) bool { return known[id] })
	for _, a := range lost {
		if !a.Settled() {
			continue // the next GC frees it
		}
		freeErr := a.Free()
		err = errors.Join(err, freeErr)
		if freeErr == nil {
			n.options.Logger.Info("an address that no pod has was freed",
				"network", a.Network, "address", a.Address, "sandbox", a.ID)
		}
	}
	if err != nil {
		n.options.Logger.Warn("lost addresses cannot be freed", "network", c.Name, "err", err)
	}
}
