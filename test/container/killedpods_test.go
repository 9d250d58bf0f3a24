package container

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// whole reports whether a long test runs as a whole, which make test-supervisor
// asks for.
func whole() bool { return os.Getenv("MINICRI_TEST_WHOLE") != "" }

// runs are the containers of a pod that a supervisor's death must not disturb.
type runs struct {
	*pod
	lives, writes, waits, dies string
	pid                        int
}

const lines = 4000

func startRuns(t *testing.T, n *harness.Node, i int) runs {
	t.Helper()
	r := runs{pod: runPod(t, n, fmt.Sprint("pod-", i))}
	r.lives = r.run("lives", forever)
	r.writes = r.run("writes", fmt.Sprintf("i=0; while [ $i -lt %d ]; do printf 'line '; echo $i; i=$((i+1)); done; exec sleep 1000000", lines))
	r.waits = r.create(shell("waits", fmt.Sprintf("exit %d", 50+i%50)))
	r.dies = r.run("dies", fmt.Sprintf("sleep 2; exit %d", 100+i%50))
	r.pid = r.info(r.lives).PID
	return r
}

// wantUndisturbed looks at the containers after the supervisor was replaced.
func (r runs) wantUndisturbed(t *testing.T, i int) {
	t.Helper()
	eventually(t, "the state is known", func() bool { return r.status(r.lives).State == running })
	if now := r.info(r.lives).PID; now != r.pid {
		t.Errorf("pod %d: pid %d, it was %d", i, now, r.pid)
	}
	r.wantExit(r.dies, int32(100+i%50), "Error")
	// The daemon asks the successor about one container after the other.
	eventually(t, "what waits is known again", func() bool { return r.status(r.waits).State == created })
	check(t, r.start(r.waits))
	r.wantExit(r.waits, int32(50+i%50), "Error")
	same(t, "exec", r.exec(r.lives, "echo hi"), "hi")
	want := strings.Builder{}
	for i := range lines {
		fmt.Fprintf(&want, "line %d\n", i)
	}
	eventually(t, "all lines are in the log", func() bool {
		stdout, _ := r.logs(r.writes)
		return len(stdout) >= want.Len()
	})
	if stdout, _ := r.logs(r.writes); stdout != want.String() {
		t.Errorf("pod %d: the log is not what was written: %d bytes, want %d", i, len(stdout), want.Len())
	}
}

// A supervisor is killed under many pods: who comes next serves within a second, and
// what it cannot know it does not make up.
func TestKilledUnderManyPods(t *testing.T) {
	count := 6
	if whole() {
		count = 100
	}
	n := newNode(t)
	var all []runs
	for i := range count {
		all = append(all, startRuns(t, n, i))
	}
	all[0].killShim()
	began := time.Now()
	all[0].awaitExecs(all[0].lives)
	t.Logf("%d pods: a successor serves %v after the kill", count, time.Since(began))
	for i, r := range all {
		r.wantUndisturbed(t, i)
	}
	for _, r := range all {
		check(t, r.stopPod())
	}
}
