package hack

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// runsIn runs a script of hack/kind/node with a minicri that prints its arguments and its input.
func runsIn(t *testing.T, minicri, script string) (string, error) {
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "minicri"), []byte("#!/bin/sh\n"+minicri), 0o755); err != nil {
		t.Fatal(err)
	}
	node, err := filepath.Abs("kind/node")
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command("bash", "-euc", script)
	command.Dir = bin
	command.Env = append(os.Environ(), "PATH="+node+":"+bin+":"+os.Getenv("PATH"))
	out, err := command.CombinedOutput()
	return string(out), err
}

// kind calls ctr and containerd in a node. Any other command fails, and the error names minicri image and crictl.
func TestCtr(t *testing.T) {
	const minicri = `[ "$2 $3" = "ls --json" ] && echo '[{"tags":["a:1","b:1"]},{"tags":null},{"tags":["c:1"]}]' && exit
		echo "minicri $*" | sed "s|/var/tmp/tmp.*|FILE|"
		case $3 in /var/tmp/*) cat "$3" ;; broken.tar) exit 3 ;; esac`
	// archive writes an archive of docker save for a processor.
	const archive = `archive() {
		echo '[{"Config":"c"}]' >manifest.json
		echo "{\"architecture\":\"$1\"}" >c
		tar -cf a.tar manifest.json c
	}
	`
	const refusal = "this node runs minicri: use 'minicri image' (import, pull, save, tag, ls, rm), or crictl\n"
	for _, c := range []struct{ name, call, want string }{
		{
			"load",
			"echo archive | ctr --namespace=k8s.io images import --all-platforms --digests --snapshotter=overlayfs -",
			"minicri image import FILE\narchive\n",
		},
		{"load, short", "echo archive | ctr -n k8s.io i import -", "minicri image import FILE\narchive\n"},
		{
			"load, a file", "ctr -n=k8s.io image import --snapshotter overlayfs 'my image.tar'",
			"minicri image import my image.tar\n",
		},
		{
			"an address", "ctr -a /run/containerd.sock --namespace k8s.io images import --digests=true x.tar",
			"minicri image import x.tar\n",
		},
		{
			"own processor", archive + "archive " + runtime.GOARCH + "; ctr images import a.tar",
			"minicri image import a.tar\n",
		},
		{
			"another processor", archive + "archive s390x; cat a.tar | ctr images import - 2>&1 || echo status $?",
			"ctr: images import: the image is for s390x, this node is " + runtime.GOARCH + ": build it for linux/" +
				runtime.GOARCH + "\nstatus 1\n",
		},
		{"tag", "ctr --namespace=k8s.io images tag --force sha256:1 app:v1", "minicri image tag sha256:1 app:v1\n"},
		{"tag by default", "ctr images tag a:1 b:1", "minicri image tag a:1 b:1\n"},
		{"save", "ctr -n k8s.io images export --all-platforms out.tar a:1", "minicri image save a:1 out.tar\n"},
		{"names", "ctr -n k8s.io images ls -q", "a:1\nb:1\nc:1\n"},
		{"list", "ctr -n k8s.io images list", "minicri image ls\n"},
		{"version", "ctr version", "minicri version\n"},
		{"failure", "ctr images import broken.tar || echo status $?", "minicri image import broken.tar\nstatus 3\n"},

		{"no command", "ctr", "ctr: a command is missing: "},
		{"no command of images", "ctr -n k8s.io images", "ctr: a command of images is missing: "},
		{"unknown command", "ctr -n k8s.io containers ls", "ctr: command containers: "},
		{"unknown command of images", "ctr images pull docker.io/library/app:v1", "ctr: command images pull: "},
		{"unknown flag", "ctr --timeout 5s images ls", "ctr: flag --timeout: "},
		{"unknown flag of a command", "ctr images import --base-name x -", "ctr: flag --base-name of images import: "},
		{"another namespace", "ctr --namespace moby images ls", "ctr: namespace moby: only k8s.io exists: "},
		{"an empty namespace", "ctr --namespace= images ls", "ctr: namespace '': only k8s.io exists: "},
		{"no namespace", "ctr -n", "ctr: -n needs a value: "},
		{
			"another snapshotter", "ctr images import --snapshotter=native -",
			"ctr: --snapshotter=native: only overlayfs exists: ",
		},
		{"no snapshotter", "ctr images import --snapshotter", "ctr: --snapshotter needs a value: "},
		{"no archive", "ctr images import", "ctr: images import with 0 arguments: "},
		{"two archives", "ctr images import a b", "ctr: images import with 2 arguments: "},
		{"one name", "ctr images tag a", "ctr: images tag with 1 arguments: "},
		{"an argument of shell", "ctr images tag '$(id)' 'a;b'", "minicri image tag $(id) a;b\n"},

		{"dump", "containerd config dump | head -n 0", ""},
		{
			"daemon", "containerd",
			"containerd: '': this node runs minicri: use 'minicri image', crictl, or the unit containerd\n",
		},
		{"other configuration", "containerd config default", "containerd: 'config default': this node runs minicri: "},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, err := runsIn(t, minicri, c.call)
			refused := strings.HasPrefix(c.want, "ctr: ") && !strings.HasSuffix(c.want, "\n")
			if refused {
				c.want += refusal
			}
			if !strings.HasPrefix(out, c.want) || (refused && err == nil) {
				t.Errorf("%s prints %q (%v), want %q", c.call, out, err, c.want)
			}
		})
	}
}

// The two programs stay small: everything else is a command of minicri.
func TestCtrIsSmall(t *testing.T) {
	if lines := strings.Count(read(t, "kind/node/ctr")+read(t, "kind/node/containerd"), "\n"); lines > 150 {
		t.Errorf("ctr and containerd have %d lines", lines)
	}
}

// A patch of kind that minicri cannot use fails, and leaves the configuration as it was.
func TestConfigureRefusesAPatch(t *testing.T) {
	script := read(t, "kind/node/configure")
	for _, c := range []struct{ name, minicri, config, says string }{
		{"translated", "printf '#  old key\nlog_level = 1\n'", "#  old key\nlog_level = 1\n", ""},
		{"new key", "printf '#  old key\n#  cri.new = 1: no\na = 2\n'", "before\n", "\ncri.new = 1: no\n"},
		{"no TOML", "echo broken >&2; exit 1", "before\n", "\nbroken\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			root := t.TempDir()
			here := strings.NewReplacer("/etc/minicri", root, "/kind/", root+"/").Replace(script)
			err := errors.Join(
				os.Mkdir(root+"/config.toml.d", 0o755),
				os.WriteFile(root+"/config.toml.d/50-containerd.toml", []byte("before\n"), 0o644),
				os.WriteFile(root+"/without-counterpart", []byte("old key\n"), 0o644),
			)
			if err != nil {
				t.Fatal(err)
			}
			out, err := runsIn(t, c.minicri, here)
			if (err == nil) != (c.says == "") || !strings.Contains(out, c.says) {
				t.Errorf("got %q (%v), want %q", out, err, c.says)
			}
			if got := read(t, root+"/config.toml.d/50-containerd.toml"); got != c.config {
				t.Errorf("the configuration is %q, want %q", got, c.config)
			}
		})
	}
}
