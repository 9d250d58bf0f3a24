package harness

import (
	"os/exec"
	"path/filepath"
)

// ImportImage brings the images of an archive to the node, by way of its
// daemon. What they take does not count as left behind.
func (n *Node) ImportImage(archive string) {
	n.t.Helper()
	output, err := exec.Command(filepath.Join(n.binaries, "minicri"), "image", "--socket", n.Socket, "import", archive).CombinedOutput()
	if err != nil {
		n.t.Fatalf("node %s: importing %s: %v: %s", n.Network, archive, err, output)
	}
	n.idle = n.look(n.idleScope())
}
