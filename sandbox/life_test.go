package sandbox_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/fake"
	"github.com/minicri/minicri/test/harness"
)

func podConfig(name string) *runtimeapi.PodSandboxConfig {
	return &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "default", Uid: "uid-" + name},
		Linux:    &runtimeapi.LinuxPodSandboxConfig{},
	}
}

// start starts a daemon on a node in memory.
func start(t *testing.T) *fake.Daemon { return fake.New(t).Start() }

func wantError(t *testing.T, err, kind error) {
	t.Helper()
	harness.Want(t, errors.Is(err, kind), "want %v, got %v", kind, err)
}

// in has each test run in a bubble, where time passes at once.
func in(t *testing.T, test func(*testing.T, *fake.Daemon)) {
	synctest.Test(t, func(t *testing.T) { test(t, start(t)) })
}

func TestLife(t *testing.T) {
	in(t, func(t *testing.T, d *fake.Daemon) {
		id, err := d.Sandboxes.Run(d.Ctx, podConfig("web"), "")
		harness.Check(t, err)
		for range 2 { // both may be repeated, and may come for an unknown id
			harness.Check(t, d.Sandboxes.Stop(d.Ctx, id))
		}
		sb, err := d.Sandboxes.Find(id)
		harness.Check(t, err)
		harness.Want(t, !sb.Ready(), "a stopped sandbox is Ready")
		for range 2 {
			harness.Check(t, d.Sandboxes.Remove(d.Ctx, id))
		}
		harness.Check(t, d.Sandboxes.Stop(d.Ctx, id))
		harness.Same(t, "left", d.Leaks(), nil)
		harness.Same(t, "calls", d.Calls()[id], "ADD first, ADD middle, ADD last, DEL last, DEL middle, DEL first, ")
	})
}

// run runs a pod.
func run(t *testing.T, d *fake.Daemon, name string) (id string) {
	id, err := d.Sandboxes.Run(d.Ctx, podConfig(name), "")
	harness.Check(t, err)
	return id
}

// Stop and Remove of one sandbox may come at once, in any order, and for ids that do not exist.
func TestEndsAtOnce(t *testing.T) {
	in(t, func(t *testing.T, d *fake.Daemon) {
		ends := []func(context.Context, string) error{d.Sandboxes.Stop, d.Sandboxes.Remove}
		for _, id := range []string{run(t, d, "web"), "0123456789abcdef", "../../etc"} {
			var all sync.WaitGroup
			for i := range 16 {
				all.Go(func() { harness.Same(t, "the end of "+id, ends[i%2](d.Ctx, id), nil) })
			}
			all.Wait()
			_, err := d.Sandboxes.Find(id)
			wantError(t, err, errdefs.ErrNotFound)
		}
		_, err := d.Sandboxes.Find("")
		wantError(t, err, errdefs.ErrInvalidArgument)
		harness.Same(t, "left", d.Leaks(), nil)
	})
}

// The attempts of a pod are created one after the other, also over a restart.
func TestCreatedAtGrows(t *testing.T) {
	in(t, func(t *testing.T, d *fake.Daemon) {
		var last int64
		for attempt := range uint32(4) {
			config := podConfig("web")
			config.Metadata.Attempt = attempt
			id, err := d.Sandboxes.Run(d.Ctx, config, "")
			harness.Check(t, err)
			sb, err := d.Sandboxes.Find(id)
			harness.Check(t, err)
			harness.Want(t, sb.CreatedAt > last, "attempt %d was created at %d, the one before at %d", attempt,
				sb.CreatedAt, last)
			last = sb.CreatedAt
			if attempt == 1 {
				d.Kill()
				d = d.Start()
			}
		}
	})
}

// A supervisor that hangs gets a request at once, and is killed at the limit. Its successor adopts the pods.
func TestSupervisorThatHangs(t *testing.T) {
	in(t, func(t *testing.T, d *fake.Daemon) {
		id := run(t, d, "web")
		d.Kill()
		d.FreezeSupervisor()
		began := time.Now()
		d, started := d.Begin()
		harness.Check(t, <-started)
		_, err := d.Supervisors.Ensure(d.Ctx, fake.Build)
		harness.Check(t, err)
		harness.Want(t, time.Since(began) < d.Limits.Kill+2*time.Second, "killed after %v", time.Since(began))
		sb, err := d.Sandboxes.Find(id)
		harness.Check(t, err)
		harness.Want(t, sb.Ready() && d.Made("process", id), "the pod has ended")
		harness.Check(t, d.Sandboxes.Remove(d.Ctx, id))
	})
}

// While the ADD of one pod hangs, others run and end.
func TestPodsBesideAnADDThatHangs(t *testing.T) {
	in(t, func(t *testing.T, d *fake.Daemon) {
		hit := d.Arm("middle ADD", d.Hang)
		failed := make(chan error)
		go func() {
			_, err := d.Sandboxes.Run(d.Ctx, podConfig("hangs"), "")
			failed <- err
		}()
		<-hit
		d.Disarm()
		id := run(t, d, "web")
		harness.Check(t, errors.Join(d.Sandboxes.Stop(d.Ctx, id), d.Sandboxes.Remove(d.Ctx, id)))
		err := <-failed
		harness.WantError(t, err, "plugin middle", "ADD", "not done after 30s")
		harness.Same(t, "left", d.Leaks(), nil)
	})
}

// Requests for one name get one sandbox if they are equal, also while it is made. Others are refused by what differs.
func TestNames(t *testing.T) {
	in(t, func(t *testing.T, d *fake.Daemon) {
		ids := make(chan string, 3)
		for range 3 {
			go func() {
				id, err := d.Sandboxes.Run(d.Ctx, podConfig("web"), "")
				harness.Check(t, err)
				ids <- id
			}()
		}
		id := <-ids
		for range 2 {
			harness.Same(t, "the id for an equal request", <-ids, id)
		}
		other := podConfig("web")
		other.Labels = map[string]string{"another": "pod"}
		_, err := d.Sandboxes.Run(d.Ctx, other, "")
		wantError(t, err, errdefs.ErrAlreadyExists)
		harness.WantError(t, err, "config.labels differs")
		other.Metadata.Attempt = 1
		second, err := d.Sandboxes.Run(d.Ctx, other, "")
		harness.Check(t, err)
		harness.Want(t, second != id, "two attempts are one sandbox")
		harness.Check(t, d.Sandboxes.Stop(d.Ctx, id))
		_, err = d.Sandboxes.Run(d.Ctx, podConfig("web"), "") // the name is taken until the sandbox is removed
		wantError(t, err, errdefs.ErrAlreadyExists)
		harness.Check(t, d.Sandboxes.Remove(d.Ctx, id))
		again, err := d.Sandboxes.Run(d.Ctx, podConfig("web"), "")
		harness.Check(t, err)
		harness.Want(t, again != id, "an id is used again")
	})
}

// A sandbox is NotReady once its pause has ended by itself, also while no daemon runs.
func TestEndOfPause(t *testing.T) {
	in(t, func(t *testing.T, d *fake.Daemon) {
		var ids []string
		for _, name := range []string{"beside", "without"} {
			id, err := d.Sandboxes.Run(d.Ctx, podConfig(name), "")
			harness.Check(t, err)
			ids = append(ids, id)
		}
		for i, id := range ids {
			sb, err := d.Sandboxes.Find(id)
			harness.Check(t, err)
			if i == 1 {
				d.Kill()
			}
			d.EndProcess(sb.Facts().Pause.PID)
			synctest.Wait()
			if i == 1 {
				d = d.Start()
			}
			sb, err = d.Sandboxes.Find(id)
			harness.Check(t, err)
			harness.Want(t, !sb.Ready(), "sandbox %d is Ready", i)
		}
	})
}

// A DEL that fails keeps its pod until the tries are used up. The background repeats it until it succeeds.
func TestDELThatFails(t *testing.T) {
	in(t, func(t *testing.T, d *fake.Daemon) {
		id, err := d.Sandboxes.Run(d.Ctx, podConfig("web"), "")
		harness.Check(t, err)
		d.Arm("first DEL", func() error { return errors.New("first fails") })
		tries := 1
		for ; d.Sandboxes.Stop(d.Ctx, id) != nil; tries++ {
			harness.Want(t, d.Made("netns", id), "the namespace that DEL needs is removed")
		}
		harness.Same(t, "calls of Stop", tries, d.NetworkLimits.DetachTries)
		harness.Check(t, d.Sandboxes.Remove(d.Ctx, id))
		harness.Want(t, d.Made("netns", id) && d.Made("address", id), "the attachment is gone, and its DEL has failed")
		d.Disarm()
		time.Sleep(d.NetworkLimits.RetryMost)
		harness.Same(t, "left", d.Leaks(), nil)
	})
}

// An attachment whose ADD never succeeded is given up after some DELs, also over restarts of the daemon.
func TestDELThatNeverSucceeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := fake.New(t)
		n.NetworkLimits.GiveUpTries, n.NetworkLimits.GiveUpTime = 20, 5*time.Minute // both have to be reached
		d := n.Start()
		for _, point := range []string{"middle ADD", "last DEL"} {
			n.Arm(point, func() error { return errors.New("it fails") })
		}
		_, err := d.Sandboxes.Run(d.Ctx, podConfig("web"), "")
		harness.Want(t, err != nil, "the ADD failed, and Run succeeded")
		d.Kill()
		d = n.Start()
		harness.Same(t, "pending attachments", len(d.Networks.Pending()), 1)
		id := d.Networks.Pending()[0].ID
		time.Sleep(20 * n.NetworkLimits.RetryMost)
		harness.Same(t, "pending attachments", len(d.Networks.Pending()), 0)
		tries := strings.Count(n.Calls()[id], "DEL last") // each may run with the configuration of now, too
		harness.Want(t, tries >= 20, "given up after %d runs of DEL", tries)
	})
}

// A caller leaves at its own deadline, while another operation has the lock of the sandbox, or starts the supervisor.
func TestDeadlines(t *testing.T) {
	in(t, func(t *testing.T, d *fake.Daemon) {
		id, err := d.Sandboxes.Run(d.Ctx, podConfig("web"), "")
		harness.Check(t, err)
		released := make(chan struct{})
		hang := func() error {
			<-released
			return nil
		}
		late := func(call func(ctx context.Context) error) {
			ctx, cancel := context.WithTimeout(d.Ctx, 2*time.Second)
			defer cancel()
			began := time.Now()
			wantError(t, call(ctx), context.DeadlineExceeded)
			harness.Same(t, "time", time.Since(began), 2*time.Second)
		}
		hit := d.Arm("pod/end pause before", hang)
		go func() { harness.Check(t, d.Sandboxes.Stop(d.Ctx, id)) }()
		<-hit
		late(func(ctx context.Context) error { return d.Sandboxes.Stop(ctx, id) })
		d.KillSupervisor()
		hit = d.Arm("supervisor start", hang)
		go func() {
			_, err := d.Supervisors.Ensure(d.Ctx, fake.Build)
			harness.Check(t, err)
		}()
		<-hit
		for range 2 { // those that wait for the lock, and the one that has it
			late(func(ctx context.Context) error {
				_, err := d.Supervisors.Ensure(ctx, fake.Build)
				return err
			})
		}
		close(released)
		synctest.Wait()
	})
}

var hostNetwork = &runtimeapi.LinuxSandboxSecurityContext{
	NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE},
}

var userNamespace = &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{
	UsernsOptions: &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: mapped, Gids: mapped},
}}

var mapped = []*runtimeapi.IDMapping{{HostId: 100000, ContainerId: 0, Length: 65536}}
