package stats

import "github.com/containerd/errdefs"

// readSum adds up cgroups. Those that are gone add nothing; errdefs.ErrNotFound
// if all are. A sum of several has no pressure, which cannot be added, and no
// limit: each part has one of its own.
func readSum(h hierarchies, paths []string, r *reader) (*usage, error) {
	var sum *usage
	var gone error
	for _, path := range paths {
		part, err := readUsage(h, path, r)
		switch {
		case errdefs.IsNotFound(err):
			gone = err
		case err != nil:
			return nil, err
		case sum == nil:
			sum = part
		default:
			sum.add(part)
		}
	}
	if sum == nil {
		return nil, gone
	}
	return sum, nil
}

func (u *usage) add(other *usage) {
	u.cpuPressure, u.memoryPressure, u.ioPressure = nil, nil, nil
	if u.cpu != nil && other.cpu != nil {
		u.cpu.total += other.cpu.total
	}
	if u.memory != nil && other.memory != nil {
		u.memory.add(other.memory)
	}
	if u.processes != nil && other.processes != nil {
		u.processes.count += other.processes.count
	}
}

func (m *memory) add(other *memory) {
	m.limit = unlimited
	m.usage += other.usage
	m.inactiveFile += other.inactiveFile
	m.anon += other.anon
	m.faults += other.faults
	m.major += other.major
}
