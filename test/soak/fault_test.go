package soak

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// limits are short where a worker would wait for them: a plugin that hangs is ended after them, a DEL that failed is
// repeated soon. Bridge does not reach them on a busy machine: ADDs that always end half-way would make no pod, and a
// DEL that is killed half-way leaves its masquerade rules for good (docs/node.md), and the soak is no test of bridge.
const limits = `[limits]
cni_add = "10s"
cni_del = "20s"
retry_first = "50ms"
retry_most = "500ms"
detach_tries = 1000000
detach_time = "1h"
give_up_tries = 4
`

// faulty is a plugin that makes nothing. While there is a file "fail", its DEL
// fails with a text that go-cni takes for success; while there is one "hang" it
// hangs, with a child in a session of its own that has nothing of its environment.
const faulty = `#!/bin/sh
cat > /dev/null
if [ -e %[1]s/hang ]; then
	env -i setsid sleep 600 &
	sleep 600
fi
if [ "$CNI_COMMAND" = DEL ] && [ -e %[1]s/fail ]; then
	echo '{"cniVersion": "1.0.0", "code": 11, "msg": "clusterinformations \"default\" not found"}'
	exit 1
fi
if [ "$CNI_COMMAND" = VERSION ]; then
	echo '{"cniVersion": "1.1.0", "supportedVersions": ["1.0.0", "1.1.0"]}'
else
	echo '{"cniVersion": "1.1.0"}'
fi
`

// addFaulty puts the plugin before the others of the chain: its DEL is the last.
func (s *soak) addFaulty() {
	n := s.node
	harness.Check(s.t, os.WriteFile(filepath.Join(n.Plugins, "faulty"), fmt.Appendf(nil, faulty, n.Dir), 0o755))
	portmap := harness.Object{"type": "portmap", "capabilities": harness.Object{"portMappings": true}, "snat": true}
	n.WriteConflist("10-test.conflist", harness.Object{"type": "faulty"}, n.BridgePlugin(), portmap)
}

// orders puts a file that the plugin looks for where it is, for a while.
func (s *soak) order(name string, during time.Duration) {
	file := filepath.Join(s.node.Dir, name)
	harness.Check(s.t, os.WriteFile(file, nil, 0o600))
	time.Sleep(during)
	harness.Check(s.t, os.Remove(file))
}

// misconfigure has a network that can never work in the place of the node's for a while:
// with a range outside of its subnet, or a plugin that is not installed after one that
// is; as another configuration of the same network, or as another network.
func (s *soak) misconfigure(random *rand.Rand) {
	n := s.node
	bridge := n.BridgePlugin()
	network := harness.Object{"cniVersion": "1.0.0", "name": n.Network, "plugins": []harness.Object{bridge, {"type": "not-installed"}}}
	if random.IntN(2) == 0 {
		bridge["ipam"].(harness.Object)["ranges"] = [][]harness.Object{{{"subnet": "10.88.0.0/24", "rangeStart": "10.99.0.1"}}}
		network["plugins"] = []harness.Object{bridge}
	}
	if random.IntN(2) == 0 {
		network["name"] = n.Network + "-other"
	}
	data, err := json.Marshal(network)
	harness.Check(s.t, err)
	half, file := filepath.Join(n.Dir, "half.conflist"), filepath.Join(n.CNIConf, "00-broken.conflist")
	harness.Check(s.t, os.WriteFile(half, data, 0o600))
	harness.Check(s.t, os.Rename(half, file))
	time.Sleep(time.Duration(random.Int64N(int64(3 * time.Second))))
	harness.Check(s.t, os.Remove(file))
}

type counts struct{ kills, terminations, failures, hangs, misconfigured, reboots int }

func (c counts) String() string {
	return fmt.Sprintf("%d kills, %d SIGTERMs, %d times DELs failed, %d times plugins hung, %d networks that cannot work, %d reboots",
		c.kills, c.terminations, c.failures, c.hangs, c.misconfigured, c.reboots)
}

func (s *soak) strike(random *rand.Rand, c *counts) {
	switch chance := random.IntN(23); {
	case chance < 9:
		c.kills++
		s.node.Kill()
		s.restart()
	case chance < 14:
		c.terminations++
		s.node.Stop()
		s.restart()
	case chance < 17:
		c.failures++
		s.order("fail", time.Duration(random.Int64N(int64(3*time.Second))))
		return
	case chance < 19:
		c.hangs++
		s.order("hang", time.Duration(random.Int64N(int64(2*time.Second))))
		return
	case chance < 22:
		c.misconfigured++
		s.misconfigure(random)
		return
	default:
		c.reboots++
		s.reboot()
	}
	s.checkWitnesses()
}

// reboot waits until the workers have no pod, and reboots the node with pods that are Ready: they are NotReady then,
// over another start too, their addresses come back by themselves, and they can be removed.
func (s *soak) reboot() {
	s.world.Lock()
	defer s.world.Unlock()
	s.node.Reboot()
	s.restart()
	s.node.Kill()
	s.restart()
	for _, was := range s.witnesses {
		if now := s.status(was.Id); now.GetState() != runtimeapi.PodSandboxState_SANDBOX_NOTREADY || now.GetCreatedAt() != was.GetCreatedAt() {
			s.t.Errorf("after a reboot a pod is %v", now)
		}
	}
	harness.Eventually(s.t, "the addresses come back after a reboot", patience, func() bool {
		return len(harness.Glob(s.t, s.node.Addresses, "10.*")) == 0
	})
	for _, was := range s.witnesses {
		s.node.RemovePod(was.Id)
	}
	s.owners.Clear()
	s.runWitnesses()
}
