package harness

import "os"

const (
	// BusyboxImage is the image that ImportBusybox brings: the programs of
	// busybox in /bin, a user "web", and settings that differ from all defaults.
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
	n.t.Helper()
	n.BuildImage(BusyboxImage, Object{
		"Env": []string{"PATH=/bin", "FROM=image"}, "Entrypoint": []string{"/bin/sh"}, "Cmd": []string{"-c", "exit 9"},
		"WorkingDir": "/srv", "StopSignal": "SIGUSR1",
	}, n.AddBusybox)
}

// AddBusybox adds what BusyboxImage has to a layer.
func (n *Node) AddBusybox(l *Layer) {
	n.t.Helper()
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
