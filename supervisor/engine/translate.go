package engine

import (
	"fmt"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/supervisor/launch"
)

// initLogLevel silences the debug lines that init pipes to us: logrus.WarnLevel.
const initLogLevel = "3"

// newProcess translates a process of a specification to libcontainer's terms.
// Standard streams and Init are the caller's to set; streams left nil are
// /dev/null.
func newProcess(p *specs.Process) (*libcontainer.Process, error) {
	limits, err := toRlimits(p.Rlimits)
	if err != nil {
		return nil, err
	}
	affinity, err := configs.ConvertCPUAffinity(p.ExecCPUAffinity)
	if err != nil {
		return nil, fmt.Errorf("cpu affinity: %w", err)
	}
	process := &libcontainer.Process{
		Args:             p.Args,
		Env:              p.Env,
		UID:              int(p.User.UID),
		GID:              int(p.User.GID),
		AdditionalGroups: toGroups(p.User.AdditionalGids),
		Cwd:              p.Cwd,
		Capabilities:     toCapabilities(p.Capabilities),
		AppArmorProfile:  p.ApparmorProfile,
		Label:            p.SelinuxLabel,
		NoNewPrivileges:  &p.NoNewPrivileges,
		Rlimits:          limits,
		Scheduler:        p.Scheduler,
		IOPriority:       p.IOPriority,
		CPUAffinity:      affinity,
		LogLevel:         initLogLevel,
	}
	if p.ConsoleSize != nil {
		process.ConsoleWidth = uint16(p.ConsoleSize.Width)
		process.ConsoleHeight = uint16(p.ConsoleSize.Height)
	}
	return process, nil
}

func toCapabilities(c *specs.LinuxCapabilities) *configs.Capabilities {
	if c == nil {
		return nil
	}
	return &configs.Capabilities{
		Bounding:    c.Bounding,
		Effective:   c.Effective,
		Inheritable: c.Inheritable,
		Permitted:   c.Permitted,
		Ambient:     c.Ambient,
	}
}

func toGroups(gids []uint32) []int {
	groups := make([]int, len(gids))
	for i, gid := range gids {
		groups[i] = int(gid)
	}
	return groups
}

func toRlimits(limits []specs.POSIXRlimit) ([]configs.Rlimit, error) {
	var list []configs.Rlimit
	for _, limit := range limits {
		kind, ok := launch.Rlimits[limit.Type]
		if !ok {
			return nil, fmt.Errorf("unknown rlimit %q", limit.Type)
		}
		list = append(list, configs.Rlimit{Type: int(kind), Hard: limit.Hard, Soft: limit.Soft})
	}
	return list, nil
}
