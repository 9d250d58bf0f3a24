package container

import (
	"context"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/minicri/minicri/internal/errtext"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/shim/api"
)

func (c *creation) ensureShim(ctx context.Context) error {
	if err := c.makeLogDirectory(); err != nil {
		return err
	}
	_, err := c.owner.shimOf(ctx, c.group())
	return err
}

// create brings init to the barrier. One that cannot run the program says so
// here already; other runtimes say it at the start, and so does this one: the
// container is made, and cannot be started.
func (c *creation) create(ctx context.Context) error {
	shim, err := c.owner.shimOf(ctx, c.group())
	if err != nil {
		return err
	}
	handler, err := c.owner.options.Handlers.Find(ctx, c.sandbox.RuntimeHandler)
	if err != nil {
		return err
	}
	if err := checkAbility(c.spec, handler); err != nil {
		return err
	}
	answer, err := shim.Create(ctx, &api.CreateRequest{
		Runtime: handler.Program,
		Pause:   c.SandboxID, Id: c.ID, Bundle: c.owner.dir(c.ID), LogPath: c.shimLog(), Stdin: c.config.GetStdin(), StdinOnce: c.config.GetStdinOnce(),
	})
	startError := ""
	if errdefs.IsFailedPrecondition(err) {
		startError, err = errtext.Of(err), nil
	}
	if err != nil {
		return err
	}
	user, err := protojson.Marshal(oci.UserOf(c.spec))
	if err != nil {
		return err
	}
	resources, err := protojson.Marshal(inForce(c.spec.Linux.Resources, *c.spec.Process.OOMScoreAdj))
	if err != nil {
		return err
	}
	return c.owner.write(c.Container, func(f *Facts) {
		f.BootID, f.Created, f.User, f.Resources, f.StartError = c.owner.bootID, true, user, resources, startError
		f.Process = process.Facts{PID: int(answer.GetPid()), StartTime: answer.GetStartTime()}
	})
}

// makeLogDirectory makes the directory of the log, also one below the pod's
// directory of logs. What is made stays in there, whatever symbolic links others
// have made.
func (c *creation) makeLogDirectory() error {
	if c.shimLog() == "" {
		return os.MkdirAll(filepath.Dir(c.LogPath), 0o755)
	}
	directory := c.sandbox.Config().GetLogDirectory()
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(directory)
	if err != nil {
		return err
	}
	defer root.Close()
	return root.MkdirAll(filepath.Dir(filepath.Clean(c.config.GetLogPath())), 0o755)
}

// shimLog is "" for a container that has no log. The directory of all pods' logs,
// /var/log/pods for example, is the node's; those of the pods in it are open to
// the process that writes logs.
func (c *creation) shimLog() string {
	directory := c.sandbox.Config().GetLogDirectory()
	if c.config.GetLogPath() == "" || directory == "" {
		return ""
	}
	base, pod := filepath.Split(filepath.Clean(directory))
	return api.GuardedPath(base, filepath.Join(pod, c.config.GetLogPath()))
}
