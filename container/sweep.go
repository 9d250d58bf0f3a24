package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/shim/client"
)

// sweep takes back what was half made, and what has no record any more.
func (s *Store) sweep() {
	ctx, cancel := s.within(s.limits.Load().Create)
	defer cancel()
	for _, c := range s.all(func(c *Container) bool { return !c.listed.Load() }) {
		s.takeBack(ctx, c)
	}
	s.sweepOrphans(ctx)
	s.sweepSupervisor(ctx)
}

// sweepSupervisor has the node's supervisor, if there was one, forget what is
// gone.
func (s *Store) sweepSupervisor(ctx context.Context) {
	groups, err := s.options.Supervisors.Groups()
	if err == nil && slices.Contains(groups, client.NodeGroup) {
		err = s.lookAgain(ctx, client.NodeGroup)
	}
	if err != nil {
		s.options.Logger.Warn("the node's supervisor may hold what is gone", "err", err)
	}
}

// sweepOrphans removes what carries our mark and has no record.
func (s *Store) sweepOrphans(ctx context.Context) {
	remains := Remains{Hierarchies: s.options.Hierarchies, Node: s.options.Node, Root: s.options.Root, State: s.options.State, Kill: s.limits.Load().Kill}
	orphans, err := remains.Find(s.explains, s.explainsPod)
	if err != nil {
		s.options.Logger.Error("sweep", "err", err)
	}
	for _, o := range orphans {
		switch o.Kind {
		case kindCgroup:
			err = remains.Remove(o)
		case kindShim:
			err = s.options.Supervisors.End(ctx, o.ID)
		default:
			mounted, listErr := readDirNames(s.imagesDir(o.ID))
			err = errors.Join(listErr, s.removeRootfs(ctx, o.ID, mounted))
		}
		s.noteRemoved(o.Kind, o.Name, err)
	}
	s.sweepSnapshots(ctx)
}

// explainsPod reports whether a pod's shim is to be there.
func (s *Store) explainsPod(id string) bool {
	_, err := s.options.Sandboxes.Find(id)
	return err == nil || s.options.Sandboxes.LeftAlone(id) || len(s.OfPod(id)) > 0
}

// errCutOff is why a half-made container could not be made.
var errCutOff = errors.New("the daemon ended while the container was being made")

func (s *Store) takeBack(ctx context.Context, c *Container) {
	release, err := c.acquire(ctx)
	if err != nil {
		return
	}
	defer release()
	if c.listed.Load() || !s.exists(c.ID) {
		return // it was being made just now
	}
	s.options.Logger.Info("take back a container that was half made", "container", c.ID)
	if !c.Facts().Created {
		c.failure.Store(&errCutOff)
	}
	if err := s.destroy(ctx, c); err != nil {
		s.options.Logger.Error("a half-made container could not be taken back: remove it", "container", c.ID, "err", err)
		s.change(c, func(f *Facts) { takeExit(f, 0, false, false, 0) })
		s.listEnded(c)
	}
}

func (s *Store) noteRemoved(kind, name string, err error) {
	if err != nil {
		s.options.Logger.Error("what has no record could not be removed", "kind", kind, "name", name, "err", err)
		return
	}
	s.options.Logger.Warn("removed what had no record", "kind", kind, "name", name)
}

// The kinds of orphans.
const (
	kindCgroup  = "container cgroup"
	kindFiles   = "container files"
	kindVolumes = "container volumes"
	kindShim    = "shim"
)

// Orphan is something that carries our mark and belongs to no container.
type Orphan struct {
	Kind string `json:"kind"`
	// Name is its path, ID that of the container, or of the pod of a shim.
	Name string `json:"name"`
	ID   string `json:"id"`
}

// Remains are the places where containers leave things.
type Remains struct {
	Hierarchies cgroup.Hierarchies
	Node        *node.Node
	// Root is the durable directory, State the volatile one.
	Root, State string
	// Kill is how long a process may take to go after SIGKILL.
	Kill time.Duration
}

// Find looks for what no container, or no pod, explains. An id is known before
// anything of its container is made and until all of it is gone, so what is
// found first and unknown then is an orphan.
func (r *Remains) Find(explains, explainsPod func(id string) bool) ([]Orphan, error) {
	mark := r.Node.ContainerMark()
	var orphans []Orphan
	paths, err := r.Hierarchies.Find(mark, r.Node.Parents())
	for _, path := range paths {
		id := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(path), mark), ".scope")
		if !explains(id) {
			orphans = append(orphans, Orphan{kindCgroup, path, id})
		}
	}
	for _, place := range []struct {
		kind, dir string
		explains  func(string) bool
	}{
		{kindShim, filepath.Join(r.State, "shims"), explainsPod},
		{kindFiles, filepath.Join(r.State, "containers"), explains},
		{kindVolumes, filepath.Join(r.Root, "container-volumes"), explains},
	} {
		names, listErr := readDirNames(place.dir)
		err = errors.Join(err, listErr)
		for _, name := range names {
			if isID(name) && !place.explains(name) {
				orphans = append(orphans, Orphan{place.kind, filepath.Join(place.dir, name), name})
			}
		}
	}
	if err != nil {
		return orphans, fmt.Errorf("look for what has no container: %w", err)
	}
	return orphans, nil
}

// isID reports whether a directory is named for a container or a pod; a shim of
// the whole node is for none.
func isID(name string) bool {
	return len(name) == 64 && strings.Trim(name, "0123456789abcdef") == ""
}

// Remove removes an orphan beside a daemon that does not know it. The snapshot of
// a container is left to the image store of the daemon.
func (r *Remains) Remove(o Orphan) error {
	switch o.Kind {
	case kindCgroup:
		return r.Hierarchies.Remove(o.Name, r.Kill)
	case kindShim:
		if err := r.killShim(o.Name); err != nil {
			return err
		}
	}
	if err := unmountBelow(o.Name); err != nil {
		return err
	}
	return os.RemoveAll(o.Name)
}

// killShim ends the shim that serves in a directory, if there is one.
func (r *Remains) killShim(dir string) error {
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, path := range lines {
		line, err := os.ReadFile(path)
		arguments := strings.Split(string(line), "\x00")
		if err != nil || len(arguments) < 2 || arguments[1] != "serve" || !strings.Contains(string(line), dir+"\x00") {
			continue // it has ended, or is another program
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			return err
		}
		stat, err := process.ReadStat(pid)
		if err != nil {
			continue
		}
		shim, err := process.Open(process.Facts{PID: pid, StartTime: stat.StartTime})
		if err != nil {
			continue
		}
		if err := errors.Join(shim.Kill(r.Kill), shim.Close()); err != nil {
			return fmt.Errorf("end the shim in %s: %w", dir, err)
		}
	}
	return nil
}

// unmountBelow unmounts all that is mounted at a directory and below it.
func unmountBelow(dir string) error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return err
	}
	for i := len(mounts) - 1; i >= 0; i-- {
		if err := unix.Unmount(mounts[i].Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount %s: %w", mounts[i].Mountpoint, err)
		}
	}
	return nil
}
