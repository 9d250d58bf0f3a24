package oci

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/user"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// sandboxUser runs pause as the user that the pod asks for. Pause has no
// /etc/group to look into, so only the groups that are listed count, whatever
// supplemental_groups_policy says.
func sandboxUser(s *Sandbox, spec *specs.Spec) error {
	security := s.security()
	spec.Process.User.UID = uint32(security.GetRunAsUser().GetValue())
	spec.Process.User.GID = uint32(security.GetRunAsGroup().GetValue())
	for _, group := range security.GetSupplementalGroups() {
		spec.Process.User.AdditionalGids = append(spec.Process.User.AdditionalGids, uint32(group))
	}
	return nil
}

// containerUser runs the container as the user that it, or else its image,
// names; /etc/passwd and /etc/group of the image give its ids.
func containerUser(c *Container, spec *specs.Spec) error {
	wanted := userSpec(c)
	found, err := lookUp(c, wanted)
	if err != nil {
		return err
	}
	spec.Process.User.UID, spec.Process.User.GID = uint32(found.Uid), uint32(found.Gid)
	groups, err := supplementalGroups(c, wanted)
	if err != nil {
		return err
	}
	// The primary group is one of the supplemental ones, too: else a program
	// that drops its groups could get around a file that denies that group.
	for _, group := range slices.Concat([]int64{int64(found.Gid)}, groups) {
		if !slices.Contains(spec.Process.User.AdditionalGids, uint32(group)) {
			spec.Process.User.AdditionalGids = append(spec.Process.User.AdditionalGids, uint32(group))
		}
	}
	return nil
}

// userSpec is "user" or "user:group", names or numbers. A group of the image
// belongs to the image's user and goes with it.
func userSpec(c *Container) string {
	security, wanted := c.security(), c.Image.User
	switch {
	case security.GetRunAsUser() != nil:
		wanted = strconv.FormatInt(security.GetRunAsUser().GetValue(), 10)
	case security.GetRunAsUsername() != "":
		wanted = security.GetRunAsUsername()
	}
	if group := security.GetRunAsGroup(); group != nil {
		name, _, _ := strings.Cut(wanted, ":")
		wanted = name + ":" + strconv.FormatInt(group.GetValue(), 10)
	}
	return wanted
}

// supplementalGroups are those that the container lists, and with the policy
// Merge also those that the user has in /etc/group of the image.
func supplementalGroups(c *Container, wanted string) ([]int64, error) {
	listed := c.security().GetSupplementalGroups()
	if c.security().GetSupplementalGroupsPolicy() == runtimeapi.SupplementalGroupsPolicy_Strict {
		return listed, nil
	}
	name, _, _ := strings.Cut(wanted, ":")
	member, err := lookUp(c, name)
	if err != nil {
		return nil, err
	}
	var groups []int64
	for _, group := range member.Sgids {
		groups = append(groups, int64(group))
	}
	return slices.Concat(groups, listed), nil
}

func lookUp(c *Container, wanted string) (*user.ExecUser, error) {
	found, err := user.GetExecUser(wanted, nil, bytes.NewReader(c.Passwd), bytes.NewReader(c.Group))
	if err != nil {
		return nil, fmt.Errorf("user %q of the image: %w: %w", wanted, err, errdefs.ErrInvalidArgument)
	}
	// A number in these files may be any; cut to 32 bits it could become root.
	for _, id := range append(found.Sgids, found.Uid, found.Gid) {
		if id < 0 || id > math.MaxInt32 {
			return nil, fmt.Errorf("user %q of the image: %d is not a user or group id: %w", wanted, id, errdefs.ErrInvalidArgument)
		}
	}
	return found, nil
}

// UserOf is the identity of a spec's first process as ContainerStatus has it.
func UserOf(spec *specs.Spec) *runtimeapi.ContainerUser {
	found := &runtimeapi.LinuxContainerUser{Uid: int64(spec.Process.User.UID), Gid: int64(spec.Process.User.GID)}
	for _, group := range spec.Process.User.AdditionalGids {
		found.SupplementalGroups = append(found.SupplementalGroups, int64(group))
	}
	return &runtimeapi.ContainerUser{Linux: found}
}

// ProcessUser is the user that the container runs as.
func ProcessUser(c *Container) (specs.User, error) {
	spec := &specs.Spec{Process: &specs.Process{}}
	err := containerUser(c, spec)
	return spec.Process.User, err
}

// HostUser returns the ids that a user of a container has on the node: in a user
// namespace others. An id that is not mapped stays as it is.
func HostUser(pod *runtimeapi.PodSandboxConfig, u specs.User) (uid, gid int) {
	userns := UserNamespace(pod)
	return hostID(userns.GetUids(), u.UID), hostID(userns.GetGids(), u.GID)
}

func hostID(mappings []*runtimeapi.IDMapping, id uint32) int {
	for _, m := range mappings {
		if id >= m.GetContainerId() && id-m.GetContainerId() < m.GetLength() {
			return int(m.GetHostId() + id - m.GetContainerId())
		}
	}
	return int(id)
}
