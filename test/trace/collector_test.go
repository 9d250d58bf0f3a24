package trace

import (
	"net"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// A collector that accepts connections and never answers, and one that is not there,
// cost no call and no shutdown anything: the daemon ends in far less than the harness
// waits for it, and pods are made as without one.
func TestCollectorThatDoesNotAnswer(t *testing.T) {
	for _, protocol := range []string{"grpc", "http"} {
		for _, listens := range []bool{true, false} {
			t.Run(protocol+map[bool]string{true: " hangs", false: " is gone"}[listens], func(t *testing.T) {
				const address = "127.0.0.1:14318"
				n := harness.NewNode(t, harness.Config("[tracing]\nendpoint = '"+address+"'\nprotocol = '"+protocol+"'\nsampling_rate_per_million = 1000000\n"))
				if listens {
					listener := n.Listen(address)
					go hold(t, listener)
				}
				began := time.Now()
				for range 20 {
					n.RemovePod(n.RunPod(n.PodConfig("web")))
				}
				t.Logf("20 pods took %v", time.Since(began))
				n.Stop()
				n.Start()
				n.RemovePod(n.RunPod(n.PodConfig("web")))
			})
		}
	}
}

// hold accepts connections, and reads and writes nothing.
func hold(t *testing.T, listener net.Listener) {
	for {
		connection, err := listener.Accept()
		if err != nil {
			return
		}
		t.Cleanup(func() { _ = connection.Close() })
	}
}
