package crash

import (
	"os"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// SIGTERM: a request that goes on is cancelled at the limit and what it made
// taken back; the daemon exits with code 0, the pods stay.
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
			if took := time.Since(began); took > 5*time.Second {
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
