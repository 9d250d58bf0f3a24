package container

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/supervisor/client"
)

// Update changes the resources in the request that are not zero: all of them or none.
func (s *Store) Update(ctx context.Context, id string, asked *runtimeapi.LinuxContainerResources) error {
	c, err := s.Find(id)
	if err != nil {
		return err
	}
	var others []Change
	err = s.underLock(ctx, c, func() (err error) {
		if err := validate.Resources("linux.", asked, s.options.Machine); err != nil {
			return err
		}
		if asked, others, err = s.askUpdate(ctx, c, asked); err != nil {
			return err
		}
		return s.update(ctx, c, asked)
	})
	if err != nil {
		return fmt.Errorf("update container %s: %w", c.ID, err)
	}
	s.applyChanges(ctx, others) // each under the lock of its container alone
	s.announce(s.begin(ctx, c), c, stepNRIUpdated, Plugins.Updated)
	return nil
}

// UpdateUnsolicited is Update for a plugin; no plugin is asked.
func (s *Store) UpdateUnsolicited(ctx context.Context, id string, wanted *runtimeapi.LinuxContainerResources) error {
	c, err := s.Find(id)
	if err != nil {
		return err
	}
	if err := s.underLock(ctx, c, func() error { return s.update(ctx, c, wanted) }); err != nil {
		return fmt.Errorf("update container %s: %w", c.ID, err)
	}
	return nil
}

// underLock calls do under the lock of a container that still exists.
func (s *Store) underLock(ctx context.Context, c *Container, do func() error) error {
	unlock, err := c.Acquire(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if !s.Exists(c.ID) { // removed meanwhile
		return errdefs.ErrNotFound
	}
	return do()
}

// update records what the supervisor sets, also if the caller goes away meanwhile.
func (s *Store) update(ctx context.Context, c *Container, asked *runtimeapi.LinuxContainerResources) error {
	ctx, cancel := s.outlive(ctx)
	defer cancel()
	machine := s.options.Machine
	if err := validate.Resources("linux.", asked, machine); err != nil {
		return err
	}
	next := merge(c.Resources(), asked)
	if err := validate.InForce("linux.", next, machine); err != nil {
		return err
	}
	if c.State() == runtimeapi.ContainerState_CONTAINER_EXITED {
		return fmt.Errorf("it has ended: %w", errdefs.ErrFailedPrecondition)
	}
	if !c.Facts().supervised() {
		return fmt.Errorf("it cannot be started: %s: %w", c.Facts().StartError, errdefs.ErrFailedPrecondition)
	}
	change := proto.CloneOf(asked)
	if change.GetMemoryLimitInBytes() != 0 || change.GetMemorySwapLimitInBytes() != 0 { // the kernel has one of both
		change.MemoryLimitInBytes, change.MemorySwapLimitInBytes = next.GetMemoryLimitInBytes(), next.GetMemorySwapLimitInBytes()
	}
	if change.GetCpuQuota() != 0 || change.GetCpuPeriod() != 0 {
		change.CpuQuota, change.CpuPeriod = next.GetCpuQuota(), next.GetCpuPeriod()
	}
	adjust := machine.OOMScoreAdjNear(int(next.GetOomScoreAdj()))
	var newAdjust *int
	if asked.GetOomScoreAdj() != 0 {
		newAdjust = &adjust
	}
	limits := oci.Resources(change, machine)
	_, err := s.options.Supervisors.Call(ctx, c.Supervisor, func(supervisor *client.Client) error { return supervisor.Update(ctx, c.ID, limits, newAdjust) })
	if err != nil && strings.Contains(err.Error(), "unable to set memory limit") { // by libcontainer, for a limit below the usage
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return err
	}
	encoded, err := protojson.Marshal(inForce(oci.Resources(next, machine), adjust))
	if err != nil {
		return err
	}
	return s.write(c, func(f *Facts) { f.Resources = encoded })
}

// merge returns what is in force with what is asked on top: zeros change nothing, lists are merged by their
// keys. A swap limit, which counts memory and swap, follows the memory limit if it was equal: no swap.
func merge(now, asked *runtimeapi.LinuxContainerResources) *runtimeapi.LinuxContainerResources {
	next := &runtimeapi.LinuxContainerResources{}
	proto.Merge(next, now)
	if asked.GetMemorySwapLimitInBytes() == 0 && now.GetMemorySwapLimitInBytes() == now.GetMemoryLimitInBytes() {
		next.MemorySwapLimitInBytes = asked.GetMemoryLimitInBytes()
	}
	single := proto.CloneOf(asked)
	if single != nil {
		single.HugepageLimits = nil
	}
	proto.Merge(next, single)
	for _, limit := range asked.GetHugepageLimits() {
		next.HugepageLimits = slices.DeleteFunc(next.HugepageLimits, func(old *runtimeapi.HugepageLimit) bool {
			return old.GetPageSize() == limit.GetPageSize()
		})
		next.HugepageLimits = append(next.HugepageLimits, limit)
	}
	return next
}

// inForce returns limits as the CRI shows them, without those that this machine has no controller for.
func inForce(limits *specs.LinuxResources, oomScoreAdj int) *runtimeapi.LinuxContainerResources {
	shown := &runtimeapi.LinuxContainerResources{
		CpuShares: int64(value(limits.CPU.Shares)), CpuQuota: value(limits.CPU.Quota), CpuPeriod: int64(value(limits.CPU.Period)),
		CpusetCpus: limits.CPU.Cpus, CpusetMems: limits.CPU.Mems,
		OomScoreAdj: int64(oomScoreAdj), Unified: limits.Unified,
	}
	if memory := limits.Memory; memory != nil {
		shown.MemoryLimitInBytes, shown.MemorySwapLimitInBytes = value(memory.Limit), value(memory.Swap)
	}
	for _, limit := range limits.HugepageLimits {
		shown.HugepageLimits = append(shown.HugepageLimits, &runtimeapi.HugepageLimit{PageSize: limit.Pagesize, Limit: limit.Limit})
	}
	return shown
}

// value returns 0 for nil.
func value[N int64 | uint64](n *N) N {
	if n == nil {
		return 0
	}
	return *n
}

// Resources returns what is in force: what the container was made with, and later updates. It is read-only.
func (c *Container) Resources() *runtimeapi.LinuxContainerResources {
	updated := &runtimeapi.LinuxContainerResources{}
	if decode(c.Facts().Resources, updated) {
		return updated
	}
	return c.config.GetLinux().GetResources()
}
