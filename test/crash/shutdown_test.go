package crash

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// SIGTERM: a request that continues is cancelled at the limit and what it made
// rolled back; the daemon exits with code 0, the pods stay.
func TestProperty10_SIGTERM(t *testing.T) {
	for _, point := range []string{"first ADD", "middle ADD", "last ADD"} {
		t.Run(point, func(t *testing.T) {
			n := newNode(t, harness.Config(`shutdown = "200ms"`))
			c := trial{node: n, witness: n.runWitness(t), point: point, row: row{operation: run}, config: n.PodConfig("case")}
			check(t, os.WriteFile(n.calls, nil, 0o600))
			before := n.Look()
			done := c.begin(limited(t), t, "hang")
			began := time.Now()
			n.Stop()
			// What it undoes takes a busy machine seconds; the plugin would take three minutes.
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("the daemon took %v to end", took)
			}
			if err := <-done; err == nil {
				t.Error("the request succeeded")
			}
			n.disarm(t)
			n.Start()
			c.checkWitness(t)
			n.wantListed(t, c.witness.Id)
			n.wantSame(t, before)
			c.checkDetached(t)
		})
	}
}

// SIGTERM inside a DEL: the daemon ends at once, the plugin runs on, and the next
// daemon takes its result, so DEL is not asked for again (CNI allows it, but a
// plugin that is cut half-way can leave what no DEL finds).
func TestProperty10_SIGTERMInsideADEL(t *testing.T) {
	n := newNode(t)
	before := n.Look()
	c := trial{node: n, point: "first DEL", row: row{operation: stop}, config: n.PodConfig("case")}
	check(t, os.WriteFile(n.calls, nil, 0o600))
	running(t, &c)
	done := c.begin(limited(t), t, "hang") // the plugin that comes last
	began := time.Now()
	n.Stop()
	took := time.Since(began)
	fmt.Printf("SIGTERM inside a DEL: the daemon ended after %v\n", took.Round(time.Millisecond))
	if took > 20*time.Second { // the plugin would take a minute
		t.Errorf("the daemon took %v to end", took)
	}
	if err := <-done; err == nil {
		t.Error("the request succeeded")
	}
	n.Start()
	n.disarm(t)
	eventually(t, "the address is given back", func() bool {
		left, _ := filepath.Glob(filepath.Join(n.Addresses, "10.*"))
		return len(left) == 0
	})
	n.RemovePod(c.id)
	n.wantSame(t, before)
	if calls := n.callsByID(t)[c.id]; !strings.Contains(calls, "DEL first") {
		t.Errorf("the DEL did not end: %s", calls)
	}
}
