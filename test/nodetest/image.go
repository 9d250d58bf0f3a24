package nodetest

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"github.com/minicri/minicri/test/harness"
)

// ImportImage brings the images of an archive to the node, by way of its daemon. What they take does not
// count as left behind.
func (n *Node) ImportImage(archive string) {
	n.t.Helper()
	output, err := exec.Command(filepath.Join(n.binaries, "minicri"), "image", "--socket", n.Socket, "import", archive).CombinedOutput()
	harness.Need(n.t, err == nil, "node %s: importing %s: %v: %s", n.Network, archive, err, output)
	n.idle = n.look(n.idleScope())
}

// BuildImage makes an image of layers, each by a function that adds its files, and brings it to the node. The
// config is the "config" of image-spec.
func (n *Node) BuildImage(name string, config Object, layers ...func(*Layer)) {
	archive := n.WriteImage(name, config, layers...)
	defer os.Remove(archive)
	n.ImportImage(archive)
}

// WriteImage writes the archive of such an image to the node's directory, and returns its path.
func (n *Node) WriteImage(name string, config Object, layers ...func(*Layer)) string {
	archive := newLayer(n)
	var names, digests []string
	for i, add := range layers {
		layer := newLayer(n)
		add(layer)
		content := layer.close()
		names = append(names, fmt.Sprintf("layer%d.tar", i))
		digests = append(digests, fmt.Sprintf("sha256:%x", sha256.Sum256(content)))
		archive.File(names[i], 0o644, 0, string(content))
	}
	archive.File("config.json", 0o644, 0, n.encode(Object{
		"architecture": runtime.GOARCH, "os": "linux", "config": config, "rootfs": Object{"type": "layers", "diff_ids": digests},
	}))
	// As docker save writes it.
	archive.File("manifest.json", 0o644, 0, n.encode([]Object{{"Config": "config.json", "RepoTags": []string{name}, "Layers": names}}))
	file, err := os.CreateTemp(n.Dir, "image")
	n.must("making an image", err)
	_, err = file.Write(archive.close())
	n.must("making an image", err)
	n.must("making an image", file.Close())
	return file.Name()
}

func (n *Node) encode(value any) string {
	data, err := json.Marshal(value)
	n.must("encoding", err)
	return string(data)
}

// Layer is a layer of an image: a tar file in memory.
type Layer struct {
	node   *Node
	buffer bytes.Buffer
	tar    *tar.Writer
}

func newLayer(n *Node) *Layer {
	l := &Layer{node: n}
	l.tar = tar.NewWriter(&l.buffer)
	return l
}

// Dir adds a directory that belongs to a user and the group of the same number.
func (l *Layer) Dir(name string, mode int64, uid int) {
	l.add(&tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: mode, Uid: uid, Gid: uid}, "")
}

// File adds a file that belongs to a user and the group of the same number.
func (l *Layer) File(name string, mode int64, uid int, content string) {
	l.add(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Uid: uid, Gid: uid, Size: int64(len(content))}, content)
}

// Link adds a symbolic link.
func (l *Layer) Link(name, target string) {
	l.add(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target}, "")
}

func (l *Layer) add(header *tar.Header, content string) {
	l.node.must("adding "+header.Name, l.tar.WriteHeader(header))
	_, err := l.tar.Write([]byte(content))
	l.node.must("adding "+header.Name, err)
}

func (l *Layer) close() []byte {
	l.node.must("ending a layer", l.tar.Close())
	return l.buffer.Bytes()
}

const (
	// BusyboxImage is the image that ImportBusybox brings: the programs of busybox in /bin, a user "web", and
	// settings that differ from all defaults.
	BusyboxImage = "test.example/busybox:1"
	busybox      = "/bin/busybox" // Debian's busybox-static
)

// applets are the commands that the image has, beside busybox.
var applets = []string{
	"cat", "chmod", "dd", "echo", "env", "false", "grep", "head", "hostname", "httpd", "id", "kill", "ls", "mkdir", "mknod", "mount",
	"nc", "printf", "ps", "pwd", "readlink", "rm", "seq", "sh", "sleep", "stat", "stty", "tail", "test", "touch", "tr", "true", "umount", "unshare", "wc", "wget", "yes",
}

// ImportBusybox builds BusyboxImage and brings it to the node.
func (n *Node) ImportBusybox() {
	n.BuildImage(BusyboxImage, Object{
		"Env": []string{"PATH=/bin", "FROM=image"}, "Entrypoint": []string{"/bin/sh"}, "Cmd": []string{"-c", "exit 9"},
		"WorkingDir": "/srv", "StopSignal": "SIGUSR1",
	}, n.AddBusybox)
}

// AddBusybox adds what BusyboxImage has to a layer.
func (n *Node) AddBusybox(l *Layer) {
	program, err := os.ReadFile(busybox)
	n.must("reading busybox, which 'make setup' installs", err)
	for _, dir := range []string{"bin", "dev", "etc", "proc", "srv", "sys"} {
		l.Dir(dir, 0o755, 0)
	}
	l.Dir("tmp", 0o1777, 0)
	l.Dir("home", 0o755, 1000)
	l.File("bin/busybox", 0o755, 0, string(program))
	for _, applet := range applets {
		l.Link("bin/"+applet, "busybox")
	}
	l.File("etc/passwd", 0o644, 0, "root:x:0:0::/root:/bin/sh\nweb:x:1000:1000::/home:/bin/sh\n")
	l.File("etc/group", 0o644, 0, "root:x:0:\nweb:x:1000:\nextra:x:2000:web\n")
}
