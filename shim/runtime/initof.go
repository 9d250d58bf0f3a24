package runtime

import (
	"time"

	"github.com/opencontainers/runc/libcontainer"
)

// Init is the first process of a container.
type Init struct {
	PID       int
	StartTime uint64 // clock ticks since boot
	Created   time.Time
	Cgroups   map[string]string // by controller, "" for version 2
}

// Init says what libcontainer knows of a container's first process, which may have
// ended.
func (b *Builtin) Init(id string) (Init, error) {
	lib, err := libcontainer.Load(b.root, id)
	if err != nil {
		return Init{}, err
	}
	state, err := lib.State()
	if err != nil {
		return Init{}, err
	}
	return initOf(state), nil
}

func initOf(state *libcontainer.State) Init {
	return Init{PID: state.InitProcessPid, StartTime: state.InitProcessStartTime, Created: state.Created, Cgroups: state.CgroupPaths}
}
