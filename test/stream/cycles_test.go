package stream

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

const (
	// fewCycles are for make test; STREAM_CYCLES says how many otherwise.
	fewCycles = 400
	// atOnce is how many clients there are at a time.
	atOnce = 4
	// longest is how long a client stays, at most.
	longest = 40 * time.Millisecond
)

func cycles(t testing.TB) int {
	t.Helper()
	text := os.Getenv("STREAM_CYCLES")
	if text == "" {
		return fewCycles
	}
	n, err := strconv.Atoi(text)
	check(t, err)
	return n
}

// Clients of all kinds come and go away at random moments; then everything is
// as before they came: goroutines of the daemon, descriptors and processes of
// daemon, shim and container.
func TestAbortedCycles(t *testing.T) {
	p := newPod(t, "while read x; do echo $x; done", func(c *runtimeapi.ContainerConfig) { c.Stdin = true },
		harness.Config(fmt.Sprintf("max_open = %d\n", 10000+cycles(t)))) // who never comes counts for a minute
	p.ServeInPod(p.id, "tcp", "127.0.0.1:7", echo)
	p.runCycles(60) // what the first ones make stays, such as caches
	p.settle()
	before := p.least()
	total := cycles(t)
	began := time.Now()
	for done := 0; done < total; done += 1000 {
		p.runCycles(min(total-done, 1000))
		t.Logf("%d cycles in %v: %v", min(done+1000, total), time.Since(began), p.holdings())
	}
	p.settle()
	after := p.least()
	defer func() {
		t.Logf("before: %v; after %d cycles: %v", before, total, after)
		if t.Failed() {
			t.Logf("children of the shim: %q", children(t, p.Supervisors()[0]))
		}
	}()
	eventually(t, "all is as before", func() bool {
		p.settle()
		after = after.lower(p.holdings())
		return after.within(before)
	})
	p.noErrors()
}

// runCycles returns when all clients have gone.
func (p *pod) runCycles(count int) {
	p.t.Helper()
	kinds := p.abortedKinds()
	var next atomic.Int64
	var clients sync.WaitGroup
	for range atOnce {
		clients.Go(func() {
			for i := next.Add(1); i <= int64(count); i = next.Add(1) {
				kinds[i%int64(len(kinds))]()
			}
		})
	}
	clients.Wait()
}

// abortedKinds are one cycle each.
func (p *pod) abortedKinds() (kinds []func()) {
	for _, c := range []client{spdyClient, v5Client, v4Client} {
		kinds = append(kinds, func() { p.abortedExec(c) }, func() { p.abortedAttach(c) })
	}
	return append(kinds, func() { p.abortedForward(spdyForward) }, func() { p.abortedForward(tunnelForward) })
}

var scripts = []string{"sleep 1000", "yes", "cat", "sleep 1000 & sleep 1000", "cat >/dev/null", "exit 3"}

func (p *pod) abortedExec(c client) {
	request := shell(scripts[rand.IntN(len(scripts))])
	request.Stdin = true
	ctx, cancel := context.WithTimeout(context.Background(), rand.N(longest))
	defer cancel()
	in, typed := io.Pipe()
	defer typed.Close()
	_ = c(p.t, p.execURL(request)).StreamWithContext(ctx, remotecommand.StreamOptions{
		Stdin: io.MultiReader(bytes.NewReader(make([]byte, unread)), in), Stdout: io.Discard, Stderr: io.Discard,
	})
}

func (p *pod) abortedAttach(c client) {
	ctx, cancel := context.WithTimeout(context.Background(), rand.N(longest))
	defer cancel()
	in, typed := io.Pipe()
	defer typed.Close()
	_ = c(p.t, p.attachURL(&runtimeapi.AttachRequest{Stdin: true, Stdout: true, Stderr: true})).StreamWithContext(ctx, remotecommand.StreamOptions{
		Stdin: io.MultiReader(strings.NewReader(strings.Repeat("line\n", rand.IntN(100))), in), Stdout: io.Discard, Stderr: io.Discard,
	})
}

func (p *pod) abortedForward(c forwardClient) {
	addresses, stop := p.forward(c, 7)
	for range rand.IntN(3) {
		conn, err := net.Dial("tcp", addresses[0])
		if err != nil {
			p.t.Error(err)
			break
		}
		defer conn.Close()
		go func() { _, _ = conn.Write(make([]byte, unread/8)) }()
	}
	time.Sleep(rand.N(longest))
	stop()
}

// holdings are what must not grow.
type holdings struct {
	goroutines, daemonFiles, shimFiles, processes int
}

func (h holdings) String() string {
	return fmt.Sprintf("%d goroutines, %d descriptors of the daemon and %d of the shim, %d processes", h.goroutines, h.daemonFiles, h.shimFiles, h.processes)
}

// asking are goroutines that serve the request for the number of goroutines:
// how many of them are counted is chance.
const asking = 2

func (h holdings) within(other holdings) bool {
	return h.goroutines <= other.goroutines+asking && h.daemonFiles <= other.daemonFiles && h.shimFiles <= other.shimFiles && h.processes <= other.processes
}

func (p *pod) holdings() holdings {
	p.t.Helper()
	shim := p.Supervisors()[0]
	return holdings{goroutines: p.goroutines(), daemonFiles: descriptors(p.t, p.PID()), shimFiles: descriptors(p.t, shim), processes: len(children(p.t, p.PID())) + len(children(p.t, shim))}
}

// least is the least that is held within a while, of each kind: what comes and
// goes with the daemon's own work does not count, nor what waits for Go's
// collector. Execs make it run.
func (p *pod) least() holdings {
	p.t.Helper()
	all := p.holdings()
	for range 100 {
		p.settle()
		all = all.lower(p.holdings())
	}
	return all
}

func (h holdings) lower(other holdings) holdings {
	return holdings{
		min(h.goroutines, other.goroutines), min(h.daemonFiles, other.daemonFiles),
		min(h.shimFiles, other.shimFiles), min(h.processes, other.processes),
	}
}

func descriptors(t testing.TB, pid int) int {
	t.Helper()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	check(t, err)
	return len(list)
}

// children describes the processes that have a parent: what each is, and in which cgroup.
func children(t testing.TB, parent int) (list []string) {
	t.Helper()
	for _, pid := range pids(t) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue // it has ended
		}
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if fields[1] != strconv.Itoa(parent) {
			continue
		}
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		cgroups, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		list = append(list, fmt.Sprintf("%d %s %s started %s: %s", pid, fields[0], bytes.ReplaceAll(line, []byte{0}, []byte{' '}), fields[19], cgroups))
	}
	return list
}

func pids(t testing.TB) (list []int) {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*")
	check(t, err)
	for _, name := range names {
		pid, err := strconv.Atoi(filepath.Base(name))
		check(t, err)
		list = append(list, pid)
	}
	return list
}
