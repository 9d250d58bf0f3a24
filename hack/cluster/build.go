package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// module is a module of tools below hack/cluster, and what is built of it.
type module struct {
	dir      string
	packages map[string]string // by the name of the program
}

var modules = []module{
	{"kubernetes", map[string]string{
		"kube-apiserver":          "k8s.io/kubernetes/cmd/kube-apiserver",
		"kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
		"kube-proxy":              "k8s.io/kubernetes/cmd/kube-proxy",
		"kube-scheduler":          "k8s.io/kubernetes/cmd/kube-scheduler",
		"kubeadm":                 "k8s.io/kubernetes/cmd/kubeadm",
		"kubectl":                 "k8s.io/kubernetes/cmd/kubectl",
		"kubelet":                 "k8s.io/kubernetes/cmd/kubelet",
		"agnhost":                 "k8s.io/kubernetes/test/images/agnhost",
	}},
	{"etcd", map[string]string{
		"etcd":    "go.etcd.io/etcd/server/v3",
		"etcdctl": "go.etcd.io/etcd/etcdctl/v3",
	}},
	{"coredns", map[string]string{"coredns": "github.com/coredns/coredns"}},
}

// tree is the source tree: this program is in its bin.
func tree() (string, error) {
	self, err := os.Executable()
	return filepath.Dir(filepath.Dir(self)), err
}

// programs builds what a cluster is made of, or finds what was built for the
// same versions, and returns its directory and the version of Kubernetes.
func programs(ctx context.Context, progress *progress) (directory, version string, err error) {
	top, err := tree()
	if err != nil {
		return "", "", err
	}
	sources := filepath.Join(top, "hack/cluster")
	if version, err = moduleVersion(ctx, filepath.Join(sources, "kubernetes"), "k8s.io/kubernetes"); err != nil {
		return "", "", err
	}
	sum, err := digestOf(sources)
	if err != nil {
		return "", "", err
	}
	directory = filepath.Join(cache, version+"-"+sum)
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return "", "", err
	}
	for _, m := range modules {
		if err := m.build(ctx, sources, directory, version, progress); err != nil {
			return "", "", err
		}
	}
	return directory, version, nil
}

// build builds what is not there yet. A name that ends with ".test" is a package
// of tests.
func (m module) build(ctx context.Context, sources, directory, version string, progress *progress) error {
	for name, pkg := range m.packages {
		target := filepath.Join(directory, name)
		if exists(target) {
			continue
		}
		verb := []string{"build"}
		if filepath.Ext(name) == ".test" {
			verb = []string{"test", "-c", "-vet=off"} // vet looks at all that they import, for minutes
		}
		if err := goBuild(ctx, verb, filepath.Join(sources, m.dir), pkg, version, target); err != nil {
			return err
		}
		progress.did("built %s", name)
	}
	return nil
}

// goBuild runs go build, or go test -c. It builds to another name first: a
// half-written program would be taken for a whole one.
func goBuild(ctx context.Context, verb []string, dir, pkg, version, target string) error {
	major, minor := "1", strings.Split(version, ".")[1]
	const stamp = " -X k8s.io/component-base/version."
	arguments := []string{verb[0], "-C", dir}
	arguments = append(append(arguments, verb[1:]...), "-trimpath", "-buildvcs=false", "-ldflags",
		"-s -w"+stamp+"gitVersion="+version+stamp+"gitMajor="+major+stamp+"gitMinor="+minor, "-o", target+".new", pkg)
	command := exec.CommandContext(ctx, "go", arguments...)
	command.Env = append(os.Environ(), "CGO_ENABLED=0")
	if _, err := output(command); err != nil {
		return err
	}
	return os.Rename(target+".new", target)
}

func moduleVersion(ctx context.Context, dir, path string) (string, error) {
	version, err := output(exec.CommandContext(ctx, "go", "list", "-C", dir, "-m", "-f", "{{.Version}}", path))
	return strings.TrimSpace(version), err
}

// digestOf is of all that says what the programs are.
func digestOf(sources string) (string, error) {
	hash := sha256.New()
	for _, m := range modules {
		for _, name := range []string{"go.mod", "go.sum"} {
			data, err := os.ReadFile(filepath.Join(sources, m.dir, name))
			if err != nil {
				return "", err
			}
			hash.Write(data)
		}
	}
	return fmt.Sprintf("%x", hash.Sum(nil))[:12], nil
}

// install puts a program at a path: a new file, so that one that runs stays what
// it is.
func install(from, to string) error {
	os.Remove(to + ".new") // of an earlier try
	if err := os.Link(from, to+".new"); err != nil {
		if err := copyFile(from, to+".new"); err != nil {
			return err
		}
	}
	return os.Rename(to+".new", to)
}

func copyFile(from, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	target, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(target, source); err != nil {
		target.Close()
		return err
	}
	return target.Close()
}
