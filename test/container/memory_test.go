package container

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// pss is the proportional set size of processes in KiB (proc_pid_smaps(5)).
func pss(t *testing.T, pids ...int) (sum int) {
	t.Helper()
	for _, pid := range pids {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		check(t, err)
		for line := range strings.Lines(string(data)) {
			kib := 0
			if _, err := fmt.Sscanf(line, "Pss: %d kB", &kib); err == nil {
				sum += kib
			}
		}
	}
	return sum
}

// A flood of newlines, 64 MiB of them if long tests are asked for as a whole (the
// log has 40 times as much), and ten commands whose output is 2 x 20 MB, cost
// daemon and supervisor memory only as long as they take.
func TestMemoryComesBack(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	loud := func() {
		request := &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", "head -c 20000000 /dev/zero; head -c 20000000 /dev/zero >&2"}, Timeout: 120}
		_, err := p.Runtime.ExecSync(limited(t), request, grpc.MaxCallRecvMsgSize(16<<20)) // as the kubelet
		check(t, err)
	}
	loud() // what the first one makes stays, such as caches
	time.Sleep(10 * time.Second)
	daemon, shim := pss(t, p.PID()), pss(t, shims(p.Node)...)
	flood := 4 << 20
	if whole() {
		flood = 64 << 20
	}
	p.wantExit(p.run("flood", fmt.Sprintf("head -c %d /dev/zero | tr '\\0' '\\n'", flood)), 0, "Completed")
	for range 10 {
		loud()
	}
	t.Logf("PSS of daemon and supervisor: %d and %d KiB before, %d and %d after the flood", daemon, shim, pss(t, p.PID()), pss(t, shims(p.Node)...))
	time.Sleep(10 * time.Second)
	daemonNow, shimNow := pss(t, p.PID()), pss(t, shims(p.Node)...)
	t.Logf("10 s later %d and %d KiB", daemonNow, shimNow)
	if daemonNow > daemon*13/10 || shimNow > shim*13/10 {
		t.Errorf("daemon: %d KiB, before %d; supervisor: %d KiB, before %d", daemonNow, daemon, shimNow, shim)
	}
}
