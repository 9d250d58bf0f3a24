package main

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
)

// ownGroup is the cgroup, below a node's, of its process 1, runtime and kubelet:
// with version 2 a cgroup that has processes gives none of its children limits.
const ownGroup = "node"

// enterCgroup moves this process into the node's cgroup and makes that the root
// of a cgroup namespace of the calling thread.
func enterCgroup(path string) error {
	hierarchies, err := cgroup.FindHierarchies()
	if err != nil {
		return err
	}
	for _, hierarchy := range hierarchies {
		if err := makeCgroup(hierarchy, path); err != nil {
			return fmt.Errorf("make cgroup %s: %w", path, err)
		}
		if err := enter(filepath.Join(hierarchy, path)); err != nil {
			return err
		}
	}
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("a cgroup namespace: %w", err)
	}
	for _, hierarchy := range hierarchies {
		own := filepath.Join(path, ownGroup)
		if err := makeCgroup(hierarchy, own); err != nil {
			return fmt.Errorf("make cgroup %s: %w", own, err)
		}
		if err := enter(filepath.Join(hierarchy, own)); err != nil {
			return err
		}
	}
	return nil
}

func enter(directory string) error {
	if err := os.WriteFile(filepath.Join(directory, "cgroup.procs"), []byte("0"), 0); err != nil {
		return fmt.Errorf("enter cgroup %s: %w", directory, err)
	}
	return nil
}

// makeCgroup makes a cgroup and those above it. A cpuset of version 1 takes no
// process before it has processors and memory: those of its parent.
func makeCgroup(hierarchy, path string) error {
	if path == "/" {
		return nil
	}
	parent := filepath.Dir(path)
	if err := makeCgroup(hierarchy, parent); err != nil {
		return err
	}
	directory := filepath.Join(hierarchy, path)
	if err := os.Mkdir(directory, 0o755); err != nil && !os.IsExist(err) {
		return err
	}
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		value, err := os.ReadFile(filepath.Join(hierarchy, parent, file))
		if os.IsNotExist(err) || cgroup.Unified() {
			continue
		}
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(directory, file), value, 0); err != nil {
			return err
		}
	}
	return nil
}
