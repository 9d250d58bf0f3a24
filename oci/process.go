package oci

import (
	"errors"
	"path"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// pauseOOMScoreAdj makes the pause process one of the last to be killed: with
// it the whole pod would have to be made again.
const pauseOOMScoreAdj = -998

func sandboxProcess(s *Sandbox, spec *specs.Spec) error {
	adjust := s.Machine.OOMScoreAdjNear(pauseOOMScoreAdj)
	spec.Process.Args = []string{PauseProgram}
	spec.Process.Cwd = "/"
	spec.Process.NoNewPrivileges = true
	spec.Process.Capabilities = &specs.LinuxCapabilities{}
	spec.Process.OOMScoreAdj = &adjust
	return nil
}

func containerProcess(c *Container, spec *specs.Spec) error {
	args, err := arguments(c)
	if err != nil {
		return err
	}
	adjust := c.Machine.OOMScoreAdjNear(int(c.Config.GetLinux().GetResources().GetOomScoreAdj()))
	spec.Process.Args = args
	spec.Process.Cwd = workingDir(c)
	spec.Process.Terminal = c.Config.GetTty()
	spec.Process.NoNewPrivileges = spec.Process.NoNewPrivileges || c.security().GetNoNewPrivs()
	spec.Process.OOMScoreAdj = &adjust
	return nil
}

// arguments: command stands for the image's entrypoint and args for its cmd,
// and a command alone drops the cmd, which was meant for the entrypoint.
func arguments(c *Container) ([]string, error) {
	command, args := c.Config.GetCommand(), c.Config.GetArgs()
	if len(command) == 0 {
		command = c.Image.Entrypoint
		if len(args) == 0 {
			args = c.Image.Cmd
		}
	}
	all := slices.Concat(command, args)
	if len(all) == 0 || all[0] == "" {
		return nil, errors.New("no command specified: neither the container nor its image says what to run: give the container a command, or the image an entrypoint")
	}
	return all, nil
}

// workingDir is the container's, the image's or the root; libcontainer makes
// it if it is missing.
func workingDir(c *Container) string {
	dir := c.Config.GetWorkingDir()
	if dir == "" {
		dir = c.Image.WorkingDir
	}
	return path.Join("/", dir)
}
