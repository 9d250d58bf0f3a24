package sandbox

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/trace"
	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/oci"
)

// Run makes the sandbox of a pod and returns its id. A second, equal call for the same pod and attempt
// waits for the first and gets the same id. The context limits the waiting, not the work.
func (s *Store) Run(ctx context.Context, config *runtimeapi.PodSandboxConfig, handler string) (string, error) {
	timeline := step.NewTimeline(nil)
	steps := step.Begin(ctx, s.options.Observe, timeline)
	var sb, other *Sandbox
	steps.Step(stepCheck, func(ctx context.Context) error { return s.check(ctx, config, handler) })
	steps.Step(stepReserve, func(context.Context) (err error) {
		sb, other, err = s.reserve(config, handler, timeline)
		return err
	})
	switch err := steps.Err(); {
	case err != nil:
		if sb != nil { // we hold the reservation and must release it
			sb.runErr = err
			close(sb.built)
			s.Forget(sb)
		}
		s.keepRefused(config, timeline, err)
		return "", err
	case other == nil:
		trace.Note(ctx, sb.Names()...)
		s.Go(func() { s.build(ctx, sb) })
		return sb.await(ctx)
	case other.RuntimeHandler != handler:
		return "", other.isAnother(fmt.Sprintf("its runtime_handler is %q, and %q is asked for", other.RuntimeHandler, handler))
	default: // fields of a newer API are not on disk, and do not count
		if field := difference(other.config.ProtoReflect(), config.ProtoReflect(), "config"); field != "" {
			return "", other.isAnother(field + " differs")
		}
		return other.await(ctx)
	}
}

// isAnother returns the error for an unequal request: its caller must not take this sandbox for what it asked for.
func (sb *Sandbox) isAnother(what string) error {
	return fmt.Errorf("sandbox %s already has this name and attempt, and %s: remove it, or ask with a higher attempt: %w", sb.ID, what, errdefs.ErrAlreadyExists)
}

// difference returns the path of the first field in which two messages differ, or "".
func difference(a, b protoreflect.Message, path string) string {
	fields := a.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		x, y, at := a.Get(field), b.Get(field), path+"."+string(field.Name())
		if x.Equal(y) && a.Has(field) == b.Has(field) {
			continue
		}
		if field.Message() == nil || field.IsList() || field.IsMap() || a.Has(field) != b.Has(field) {
			return at
		}
		if inside := difference(x.Message(), y.Message(), at); inside != "" {
			return inside
		}
	}
	return ""
}

// reserve gives the name to a new sandbox, or returns the one that has it. Two sandboxes
// never have one name, so a pod never has two namespaces.
func (s *Store) reserve(config *runtimeapi.PodSandboxConfig, handler string, timeline *step.Timeline) (sb, other *Sandbox, err error) {
	record, err := s.newRecord(config, handler)
	if err != nil {
		return nil, nil, err
	}
	sb = newSandbox(record, config)
	sb.Rows = timeline
	sb.LockNew() // for build
	if other, err = s.Reserve(sb, func(created int64) { sb.CreatedAt = created }); other != nil || err != nil {
		return nil, other, err
	}
	return sb, nil, nil
}

func (s *Store) newRecord(config *runtimeapi.PodSandboxConfig, handler string) (Record, error) {
	encoded, err := protojson.Marshal(config)
	if err != nil {
		return Record{}, fmt.Errorf("encode the config: %w", err)
	}
	o := s.options
	id := o.Node.NewID()
	parent := cmp.Or(config.GetLinux().GetCgroupParent(), o.CgroupParent)
	record := Record{
		ID: id, RuntimeHandler: handler, Supervisor: o.Supervisors.Own(), Config: encoded,
		CgroupsPath: oci.CgroupsPath(parent, id, o.SystemdCgroup),
	}
	if handler == "" {
		record.DefaultHandler = o.Handlers.Default()
	}
	return record, nil
}

// await waits for the Run that makes the sandbox, and returns its outcome.
func (sb *Sandbox) await(ctx context.Context) (string, error) {
	select {
	case <-sb.built:
	case <-ctx.Done():
		return "", fmt.Errorf("sandbox %s is still being made, ask again for the same pod to wait for it: %w", sb.ID, context.Cause(ctx))
	}
	if sb.runErr != nil {
		return "", sb.runErr
	}
	if !sb.Ready() {
		return "", fmt.Errorf("sandbox %s of this name and attempt is not ready: remove it, or ask with a higher attempt: %w", sb.ID, errdefs.ErrAlreadyExists)
	}
	return sb.ID, nil
}

// check refuses what cannot work, before anything is made.
func (s *Store) check(ctx context.Context, config *runtimeapi.PodSandboxConfig, handler string) error {
	o := s.options
	if err := validate.Pod(config, handler, validate.Node{Machine: o.Machine, Handlers: o.Handlers.Names(), SystemdCgroup: o.SystemdCgroup}); err != nil {
		return err
	}
	found, err := o.Handlers.Find(ctx, handler)
	if err != nil {
		return err
	}
	if oci.UserNamespace(config) != nil && !found.Features.UserNamespaces {
		return fmt.Errorf("config.linux.security_context.namespace_options.userns_options: "+
			"the runtime of handler %q cannot map the owners of mounts: %w", handler, errdefs.ErrInvalidArgument)
	}
	return nil
}

// build is Run after the reservation.
func (s *Store) build(ctx context.Context, sb *Sandbox) {
	defer close(sb.built)
	ctx, cancel := step.Bound(ctx, s.Base, s.Limits().Run)
	defer cancel()
	defer sb.Unlock() // reserve locked it
	c := &creation{Sandbox: sb, owner: s, steps: s.begin(ctx, sb)}
	c.run()
	if c.steps.Err() != nil {
		sb.runErr = s.undo(ctx, c)
		return
	}
	sb.Show()
	s.emit(sb, runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT)
	s.emit(sb, runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
	s.watch(sb)
}

// creation is one pass through the steps of Run.
type creation struct {
	*Sandbox
	owner    *Store
	steps    *step.Sequence
	prepared *process.Facts // pause at the exec barrier
	labels   oci.SELinux
	holder   Holder // of a new user namespace, or nil; one goroutine, build's, makes and ends it
}

func (c *creation) run() {
	steps := c.steps
	steps.Step(stepRecord, c.writeRecord)
	synced := steps.Async(stepSync, func(context.Context) error { return c.owner.files.Records.Sync(c.ID) })
	filed := steps.Async(stepFiles, c.makeFiles) // needs no namespace
	if oci.UserNamespace(c.config) != nil {
		steps.Step(stepUserns, c.makeUserns)
	}
	if !c.hostNetwork() {
		steps.Step(stepNetns, c.makeNetns)
		steps.Step(stepLoopback, func(context.Context) error {
			return c.owner.options.Kernel.LoopbackUp(c.owner.options.Netns.Path(c.ID))
		})
	}
	steps.Join(filed)
	late := needsInterfaces(c.config.GetLinux().GetSysctls()) || needsInterfaces(c.owner.options.Defaults.Sysctls)
	var prepared *step.Async
	if c.hostNetwork() || !late {
		prepared = steps.Async(stepPrepare, c.prepare)
	}
	steps.Join(synced) // what ADD makes may survive a power cut, unlike what else is made meanwhile
	if !c.hostNetwork() {
		steps.Step(stepAdd, c.attach)
		steps.Step(stepAddresses, func(context.Context) error {
			if len(c.Addresses()) == 0 {
				return network.ErrNoAddress
			}
			return nil
		})
	}
	if prepared != nil {
		steps.Join(prepared)
	} else {
		steps.Step(stepPrepare, c.prepare)
	}
	// From here on plugins, later ones included, know of the pod and learn of its end.
	c.announced = steps.Err() == nil
	if c.owner.hasPlugins() {
		steps.Step(stepNRIRun, func(ctx context.Context) error {
			c.Update(func(f *Facts) { f.Pause = *c.prepared })
			return c.owner.options.Plugins.RunPod(ctx, c.Sandbox)
		})
	}
	steps.Step(stepStart, c.start)
}

// undo destroys what a failed Run made, and lists the sandbox as NotReady if it cannot.
func (s *Store) undo(ctx context.Context, c *creation) error {
	// The daemon waits for this when it ends.
	ctx, cancel := step.Bound(ctx, context.Background(), s.Limits().Destroy)
	defer cancel()
	c.Failure = c.steps.Err()
	if s.SELinux(c.ID).Process == "" { // pause was not prepared: destroy does not know the level
		s.options.Machine.ReleaseLevel(c.labels.Process)
	}
	undoErr := errors.Join(c.endHolder(), s.destroy(ctx, c.Sandbox, leaveToJournal))
	err := fmt.Errorf("run sandbox %s: %w", c.ID, c.Failure)
	if undoErr == nil {
		return err
	}
	s.log(c.Sandbox).Error("a sandbox that failed could not be rolled back: stop and remove it", "err", undoErr)
	c.Show()
	return errors.Join(err, fmt.Errorf("roll back sandbox %s: %w", c.ID, undoErr))
}

func (c *creation) writeRecord(context.Context) error {
	if err := c.owner.options.Node.Know(cgroup.Path(c.CgroupsPath)); err != nil {
		return err
	}
	return c.owner.files.Records.Put(c.ID, c.Record)
}

func (c *creation) makeNetns(context.Context) error {
	if c.holder != nil {
		return errors.Join(c.owner.options.Netns.Pin(c.ID, c.holder.Namespace("net")), c.endHolder())
	}
	return c.owner.options.Netns.Create(c.ID)
}

func (c *creation) attach(ctx context.Context) error {
	o := c.owner.options
	attachment, err := newAttachment(c.Sandbox)
	if err != nil {
		return err
	}
	result, err := o.Networks.AttachIn(ctx, o.Handlers.CNIConf(c.Handler()), attachment, o.Netns.Path(c.ID))
	c.network = result.Config
	if err != nil {
		return err
	}
	raw, err := json.Marshal(result.Raw)
	if err != nil {
		return err
	}
	c.Update(func(f *Facts) { f.Addresses, f.CNIResult = result.Addresses, raw })
	return nil
}

func (c *creation) prepare(ctx context.Context) error {
	spec, err := c.spec()
	if err != nil {
		return err
	}
	c.prepared, err = c.owner.preparePause(ctx, c.Sandbox, spec, nil)
	return err
}

// start starts pause and writes the facts that make the sandbox Ready.
func (c *creation) start(ctx context.Context) (err error) {
	if c.pause, err = c.owner.startPause(ctx, c.Sandbox, c.prepared); err != nil {
		return err
	}
	c.Update(func(f *Facts) { f.BootID, f.Pause, f.ReadyAt = c.owner.bootID, *c.prepared, time.Now() })
	return c.owner.writeFacts(c.Sandbox)
}

// makeUserns makes the user namespace and, in one clone(2), the network namespace that the step netns pins.
func (c *creation) makeUserns(context.Context) error {
	userns := oci.UserNamespace(c.config)
	o := c.owner.options
	holder, err := o.Kernel.StartHolder(c.owner.pauseProgram(), oci.IDMappings(userns.GetUids()), oci.IDMappings(userns.GetGids()))
	if err != nil {
		return err
	}
	c.holder = holder
	err = o.Userns.Pin(c.ID, holder.Namespace("user"))
	if err == nil && !c.hostNetwork() {
		return nil
	}
	return errors.Join(err, c.endHolder())
}

func (c *creation) endHolder() error {
	if c.holder == nil {
		return nil
	}
	return c.holder.End()
}

// bandwidthBurst is as much as fits: the rate is the limit, not the burst.
const bandwidthBurst = math.MaxUint32

// newAttachment returns ADD's arguments, like containerd's: CNI_ARGS name the pod.
func newAttachment(sb *Sandbox) (network.Attachment, error) {
	metadata := sb.config.GetMetadata()
	a := network.Attachment{
		ID: sb.ID,
		Args: map[string]string{
			"IgnoreUnknown":              "1",
			"K8S_POD_NAMESPACE":          metadata.GetNamespace(),
			"K8S_POD_NAME":               metadata.GetName(),
			"K8S_POD_INFRA_CONTAINER_ID": sb.ID,
			"K8S_POD_UID":                metadata.GetUid(),
		},
	}
	for name, value := range capabilities(sb) {
		if err := a.SetCapability(name, value); err != nil {
			return network.Attachment{}, err
		}
	}
	return a, nil
}

func capabilities(sb *Sandbox) map[string]any {
	values := map[string]any{"io.kubernetes.cri.pod-annotations": sb.config.GetAnnotations()}
	if mappings := portMappings(sb); len(mappings) > 0 {
		values["portMappings"] = mappings
	}
	if limit, limited := bandwidth(sb.config.GetAnnotations()); limited {
		values["bandwidth"] = limit
	}
	if dns := sb.config.GetDnsConfig(); dns != nil {
		values["dns"] = network.DNS{Servers: dns.GetServers(), Searches: dns.GetSearches(), Options: dns.GetOptions()}
	}
	if parent := sb.config.GetLinux().GetCgroupParent(); parent != "" {
		values["cgroupPath"] = parent
	}
	return values
}

// portMappings are those with a host port; the others only inform.
func portMappings(sb *Sandbox) (mappings []network.PortMapping) {
	for _, m := range sb.config.GetPortMappings() {
		if m.GetHostPort() <= 0 {
			continue
		}
		hostIP, _ := validate.HostIP(m.GetHostIp()) // check has refused what is none
		mappings = append(mappings, network.PortMapping{
			HostPort: m.GetHostPort(), ContainerPort: m.GetContainerPort(),
			Protocol: strings.ToLower(m.GetProtocol().String()), HostIP: hostIP,
		})
	}
	return mappings
}

// bandwidth reads the annotations, which check has validated.
func bandwidth(annotations map[string]string) (limit network.BandWidth, limited bool) {
	if rate, err := validate.BitsPerSecond(annotations[validate.IngressBandwidth]); err == nil && rate > 0 {
		limit.IngressRate, limit.IngressBurst, limited = rate, bandwidthBurst, true
	}
	if rate, err := validate.BitsPerSecond(annotations[validate.EgressBandwidth]); err == nil && rate > 0 {
		limit.EgressRate, limit.EgressBurst, limited = rate, bandwidthBurst, true
	}
	return limit, limited
}
