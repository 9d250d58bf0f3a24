package container

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// fireTime is how long the supervisor is under fire in make test-supervisor.
const fireTime = 2 * time.Minute

// The supervisor is killed, and stopped so that it hangs, at random moments, while
// containers are made, run commands, end, are stopped and removed side by side:
// each life comes to its end with the exit code that is right or is said to be
// unknown, a container that was there before lives on, its log has every line, and
// nothing is left.
func TestSupervisorUnderFire(t *testing.T) {
	if !whole() {
		t.Skip("make test-supervisor runs it for minutes")
	}
	first := newPod(t)
	witness := first.run("witness", "i=0; while true; do echo line $i; i=$((i+1)); sleep 0.01; done")
	pid := first.info(witness).PID
	over := make(chan struct{})
	var workers sync.WaitGroup
	var lives, unknown [4]int
	for worker := range lives {
		p := runPod(t, first.Node, fmt.Sprint("fire-", worker))
		workers.Go(func() {
			for attempt := 0; ; attempt++ {
				select {
				case <-over:
					return
				default:
				}
				if !p.lifeUnderFire(attempt) {
					unknown[worker]++
				}
				lives[worker]++
			}
		})
	}
	shots := first.fire(fireTime)
	close(over)
	workers.Wait()
	t.Logf("%v: %d lives, %d with an unknown exit code", shots, sum(lives[:]), sum(unknown[:]))
	eventually(t, "the witness is known to run", func() bool { return first.status(witness).State == running })
	if now := first.info(witness).PID; now != pid {
		t.Errorf("the witness is process %d, it was %d", now, pid)
	}
	stdout, _ := first.logs(witness)
	for i, line := range strings.Split(strings.TrimSuffix(stdout, "\n"), "\n") {
		if line != fmt.Sprint("line ", i) {
			t.Fatalf("line %d of the witness: %q", i, line)
		}
	}
	before := descriptors(t, first.Node)
	if before > 100 {
		t.Errorf("the supervisor of five pods has %d descriptors", before)
	}
}

func sum(numbers []int) (total int) {
	for _, n := range numbers {
		total += n
	}
	return total
}

// fire shoots at the supervisor, and counts.
func (p *pod) fire(limit time.Duration) (shots map[string]int) {
	shots = make(map[string]int)
	for began := time.Now(); time.Since(began) < limit; time.Sleep(rand.N(1500 * time.Millisecond)) {
		for _, pid := range shims(p.Node) {
			switch rand.N(5) {
			case 0:
				shots["stopped"]++ // the next call finds out
				_ = unix.Kill(pid, unix.SIGSTOP)
			case 1:
				shots["stopped for a moment"]++
				_ = unix.Kill(pid, unix.SIGSTOP)
				time.AfterFunc(rand.N(500*time.Millisecond), func() { _ = unix.Kill(pid, unix.SIGCONT) })
			default:
				shots["killed"]++
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
	}
	for _, pid := range shims(p.Node) {
		_ = unix.Kill(pid, unix.SIGCONT)
	}
	return shots
}

// lifeUnderFire is one life of a container, whose steps are repeated as a kubelet
// does; it reports whether the exit code is known.
func (p *pod) lifeUnderFire(attempt int) (known bool) {
	code := int32(1 + attempt%100)
	config := shell("app", fmt.Sprintf("echo begun; sleep 0.%02d; exit %d", attempt%40, code))
	config.Metadata.Attempt, config.LogPath = uint32(attempt), fmt.Sprintf("app-%d.log", attempt)
	var id string
	if !p.insist("create", func() (err error) { id, err = p.tryCreate(config); return err }) {
		return false
	}
	started := p.insist("start", func() error { return p.start(id) })
	if attempt%3 == 0 {
		_, _ = p.Runtime.ExecSync(limited(p.t), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}, Timeout: 5}) // it may have ended
	}
	p.insist("stop", func() error { return p.stop(id, 5) })
	s := p.status(id)
	known = s.ExitCode != 255 && s.Reason != "Unknown"
	if started && known && s.ExitCode != code {
		p.t.Errorf("container %d: exit code %d (%s), want %d", attempt, s.ExitCode, s.Reason, code)
	}
	p.insist("remove", func() error { return p.remove(id) })
	return known
}

// insist repeats what failed because the supervisor was not there, and reports
// whether it was done; what was done before the answer was lost counts.
func (p *pod) insist(what string, do func() error) bool {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		err := do()
		switch code := status.Code(err); {
		case err == nil:
			return true
		case code == codes.FailedPrecondition || code == codes.Internal: // it was started, or ended, by the call before
			return false
		case code != codes.Unavailable && code != codes.DeadlineExceeded && code != codes.AlreadyExists && code != codes.Unknown, time.Now().After(deadline):
			p.t.Errorf("%s: %v", what, err)
			return false
		}
	}
}
