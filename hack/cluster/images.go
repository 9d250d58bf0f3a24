package main

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// repository is where the images say they are from. No registry serves it.
const repository = "cluster.minicri.test"

// Tags of the images that are not Kubernetes' own.
const (
	etcdTag    = "minicri"
	coreDNSTag = "minicri"
	toolsImage = repository + "/tools:minicri"
)

// busybox has every command of the tools' image.
const busybox = "/bin/busybox"

// imageOf is an image that is made of programs and of what Debian has installed.
type imageOf struct {
	name, tag    string
	programs     []string // of the cluster's programs
	installed    []string // of Debian, with their libraries
	entrypoint   []string
	command      []string
	user         string
	links        map[string]string // symbolic links
	files        map[string]string // what is in the image, file of this machine
	setuid       string            // a program with this bit
	controlPlane bool              // for nodes with the control plane only
}

func images(version, pauseTag string) []imageOf {
	return []imageOf{
		{name: "kube-apiserver", tag: version, programs: []string{"kube-apiserver"}, controlPlane: true},
		{name: "kube-controller-manager", tag: version, programs: []string{"kube-controller-manager"}, controlPlane: true},
		{name: "kube-scheduler", tag: version, programs: []string{"kube-scheduler"}, controlPlane: true},
		{name: "etcd", tag: etcdTag, programs: []string{"etcd", "etcdctl"}, controlPlane: true},
		{name: "kube-proxy", tag: version, programs: []string{"kube-proxy"}, installed: []string{"/usr/sbin/nft"}},
		{name: "coredns", tag: coreDNSTag, programs: []string{"coredns"}, entrypoint: []string{"/usr/local/bin/coredns"}},
		{name: "pause", tag: pauseTag, entrypoint: []string{"/pause"}},
		{name: "tools", tag: coreDNSTag, programs: []string{"agnhost"}, installed: []string{busybox}},
	}
}

func (i imageOf) reference() string {
	if strings.Contains(i.name, "/") {
		return i.name + ":" + i.tag
	}
	return repository + "/" + i.name + ":" + i.tag
}

// file is where the image is kept; another definition is another file, and so is
// another replica, the only program that does not follow from the versions.
func (i imageOf) file(programs string) (string, error) {
	definition := fmt.Appendf(nil, "%+v", i)
	if slices.Contains(i.programs, "replica") {
		replica, err := os.ReadFile(filepath.Join(programs, "replica"))
		if err != nil {
			return "", err
		}
		definition = append(definition, replica...)
	}
	sum := sha256.Sum256(definition)
	return filepath.Join(programs, fmt.Sprintf("%s-%s-%x.tar", strings.ReplaceAll(i.name, "/", "_"), i.tag, sum[:4])), nil
}

// archives makes the images, or finds those made before, and returns their files.
func archives(ctx context.Context, programs, version, pauseTag string, progress *progress) (everywhere, controlPlane []string, err error) {
	for _, i := range images(version, pauseTag) {
		file, err := i.make(ctx, programs, progress)
		if err != nil {
			return nil, nil, err
		}
		if i.controlPlane {
			controlPlane = append(controlPlane, file)
		} else {
			everywhere = append(everywhere, file)
		}
	}
	return everywhere, controlPlane, nil
}

// make makes the image, or finds the one made before.
func (i imageOf) make(ctx context.Context, programs string, progress *progress) (string, error) {
	file, err := i.file(programs)
	if err != nil || exists(file) {
		return file, err
	}
	if err := i.write(ctx, programs, file); err != nil {
		return "", fmt.Errorf("make the image %s: %w", i.reference(), err)
	}
	progress.did("made the image %s", i.reference())
	return file, nil
}

// write writes the image as docker save does, with one layer.
func (i imageOf) write(ctx context.Context, programs, file string) error {
	layer := file + ".layer"
	defer os.Remove(layer)
	if err := i.writeLayer(ctx, programs, layer); err != nil {
		return err
	}
	content, err := os.ReadFile(layer)
	if err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{
			"Entrypoint": i.entrypoint, "Cmd": i.command, "User": i.user, "Env": []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(content))}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]any{map[string]any{
		"Config": "config.json", "RepoTags": []string{i.reference()}, "Layers": []string{"layer.tar"},
	}})
	if err != nil {
		return err
	}
	archive, err := os.Create(file + ".new")
	if err != nil {
		return err
	}
	defer archive.Close()
	w := layerWriter{Writer: tar.NewWriter(archive)}
	w.data("manifest.json", 0o644, manifest)
	w.data("config.json", 0o644, config)
	w.data("layer.tar", 0o644, content)
	if err := w.close(); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

func (i imageOf) writeLayer(ctx context.Context, programs, layer string) error {
	file, err := os.Create(layer)
	if err != nil {
		return err
	}
	defer file.Close()
	w := layerWriter{Writer: tar.NewWriter(file), written: make(map[string]bool)}
	w.skeleton()
	if i.name == "pause" {
		top, err := tree()
		if err != nil {
			return err
		}
		w.file(filepath.Join(top, "oci/pause/pause.elf"), "/pause", 0o755)
	}
	for _, program := range i.programs {
		mode := int64(0o755)
		if program == i.setuid {
			mode = 0o4755
		}
		w.file(filepath.Join(programs, program), "/usr/local/bin/"+program, mode)
	}
	for to, from := range i.files {
		w.file(from, to, 0o644)
	}
	for link, to := range i.links {
		w.link(link, to)
	}
	for _, program := range i.installed {
		libraries, err := librariesOf(ctx, program)
		if err != nil {
			return err
		}
		for _, installed := range append(libraries, program) {
			w.file(installed, installed, 0o755)
		}
	}
	if slices.Contains(i.installed, busybox) {
		applets, err := output(exec.CommandContext(ctx, busybox, "--list"))
		if err != nil {
			return err
		}
		for applet := range strings.FieldsSeq(applets) {
			if applet != "busybox" {
				w.link("/bin/"+applet, "busybox")
			}
		}
	}
	return w.close()
}

// librariesOf asks the dynamic linker what a program is linked with.
func librariesOf(ctx context.Context, program string) ([]string, error) {
	out, err := exec.CommandContext(ctx, "ldd", program).CombinedOutput()
	if strings.Contains(string(out), "not a dynamic executable") {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ldd %s: %w: %s", program, err, out)
	}
	var libraries []string
	for word := range strings.FieldsSeq(string(out)) {
		if strings.HasPrefix(word, "/") {
			libraries = append(libraries, word)
		}
	}
	return libraries, nil
}
