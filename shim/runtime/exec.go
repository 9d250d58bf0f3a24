package runtime

import "github.com/opencontainers/runtime-spec/specs-go"

// Exec is of Container.
func (c *builtinContainer) Exec(spec *specs.Process, streams Streams) (*Process, error) {
	process, passed, err := processWithBytes(spec, c.MountLabel())
	if err != nil {
		return nil, err
	}
	defer passed.Close()
	t := c.execs.newTree()
	if t != nil {
		process.SubCgroupPaths = map[string]string{t.controller: t.sub}
	}
	p, err := c.startExec(process, streams, t)
	if err != nil && t != nil {
		t.close()
	}
	return p, err
}

// MountLabel is of Container.
func (c *builtinContainer) MountLabel() string { return c.lib.Config().MountLabel }

// EndExecs is of Container.
func (c *builtinContainer) EndExecs() error { return c.execs.endAll() }
