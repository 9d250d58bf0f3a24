package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sync/errgroup"

	"github.com/minicri/minicri/internal/cgroup"
)

// down removes the pods of every node and looks for what they left, then ends
// the nodes, whatever was found, and looks for what they left on the machine. The
// error says what was found.
func (c *cluster) down(ctx context.Context) error {
	var looking errgroup.Group
	found := make([]error, len(c.Nodes))
	for i, n := range c.Nodes {
		looking.Go(func() error {
			found[i] = n.emptyAndLook(ctx)
			return nil
		})
	}
	looking.Wait()
	if err := c.end(); err != nil {
		return errors.Join(append(found, err)...)
	}
	c.progress.did("the cluster %s is gone", c.Name)
	return errors.Join(append(found, c.lookAtMachine())...)
}

// end ends every process of the cluster, also where one of them fails to, and
// removes its files when none is left.
func (c *cluster) end() error {
	var errs []error
	for _, n := range c.Nodes {
		errs = append(errs, n.remove())
	}
	if err := kill(c.Hub); err != nil {
		errs = append(errs, fmt.Errorf("end the hub: %w", err))
	}
	hierarchies, err := cgroup.FindHierarchies()
	if err == nil {
		err = hierarchies.Remove(c.cgroupParent(), killTime)
	}
	if err := errors.Join(append(errs, err)...); err != nil {
		return fmt.Errorf("end cluster %s, whose files stay in %s: %w", c.Name, c.dir(), err)
	}
	return os.RemoveAll(c.dir())
}

// lookAtMachine looks for what must not be there any more.
func (c *cluster) lookAtMachine() error {
	var leaks []error
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if strings.HasPrefix(m.Mountpoint, c.dir()+"/") {
			leaks = append(leaks, fmt.Errorf("left on the machine: mount %s", m.Mountpoint))
		}
	}
	hierarchies, err := cgroup.FindHierarchies()
	if err != nil {
		return err
	}
	if hierarchies.Exists(c.cgroupParent()) {
		leaks = append(leaks, fmt.Errorf("left on the machine: cgroup %s", c.cgroupParent()))
	}
	if exists(c.dir()) {
		leaks = append(leaks, fmt.Errorf("left on the machine: %s", c.dir()))
	}
	return errors.Join(leaks...)
}
