package leak

import (
	"github.com/moby/sys/mountinfo"
)

// addMounts adds the mounts of the calling thread's mount namespace at or
// below the prefixes. Two mounts on one another have one name and count as two.
func (s Snapshot) addMounts(prefixes []string) error {
	if len(prefixes) == 0 {
		return nil
	}
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !belowAny(m, prefixes), false
	})
	if err != nil {
		return err
	}
	for _, m := range mounts {
		s.add(Mount, m.Mountpoint, "", m.FSType+" of "+m.Source)
	}
	return nil
}

func belowAny(m *mountinfo.Info, prefixes []string) bool {
	for _, prefix := range prefixes {
		if skip, _ := mountinfo.PrefixFilter(prefix)(m); !skip {
			return true
		}
	}
	return false
}
