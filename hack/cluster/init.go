package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

const (
	nodeBinaries = "/usr/local/bin"
	// serviceDir has NAME.pid of each service; with a NAME.stop it is not started.
	serviceDir = "/run/services"
	nodePath   = "PATH=" + nodeBinaries + ":/usr/sbin:/usr/bin:/sbin:/bin"
)

// becomeNode turns this process, the first of its namespaces, into process 1 of
// a node. What is unshared here is the calling thread's; exec keeps that one.
func becomeNode(dir, name string) error {
	runtime.LockOSThread()
	// Our starter closes its end when the node is in the network.
	if _, err := io.ReadAll(os.NewFile(inherited, "start")); err != nil {
		return err
	}
	cluster, err := load(filepath.Base(dir))
	if err != nil {
		return err
	}
	n, err := cluster.node(name)
	if err != nil {
		return err
	}
	if err := enterCgroup(n.cgroup()); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(name)); err != nil {
		return err
	}
	if err := mountNode(n); err != nil {
		return err
	}
	if err := setNodeSysctls(); err != nil {
		return err
	}
	self := filepath.Join(nodeBinaries, "cluster")
	return syscall.Exec(self, []string{self, servicesRole, cluster.Runtime}, []string{nodePath, "HOME=/root"})
}

// service is a program that process 1 of a node starts again when it ends.
type service struct {
	name    string
	needs   [][]string // the files without which it is not started: one of each
	command func() []string
}

func services(runtime string) []service {
	engine, socket := service{minicriRuntime, nil, func() []string { return []string{"minicri"} }}, minicriSocket
	if runtime == containerdRuntime {
		engine = service{containerdRuntime, nil, func() []string { return []string{"containerd"} }}
		socket = containerdSocket
	}
	// kubeadm would start it by systemd, as soon as it has written its files.
	kubelet := service{"kubelet", [][]string{
		{socket},
		{"/var/lib/kubelet/config.yaml"},
		{"/etc/kubernetes/bootstrap-kubelet.conf", "/etc/kubernetes/kubelet.conf"},
	}, kubeletCommand}
	return []service{engine, kubelet}
}

func kubeletCommand() []string {
	command := []string{
		"kubelet", "--config=/var/lib/kubelet/config.yaml", "--kubeconfig=/etc/kubernetes/kubelet.conf",
		"--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf",
	}
	flags, err := os.ReadFile("/var/lib/kubelet/kubeadm-flags.env")
	if err != nil {
		return command // the kubelet says what it misses
	}
	line := strings.TrimPrefix(strings.TrimSpace(string(flags)), "KUBELET_KUBEADM_ARGS=")
	return append(command, strings.Fields(strings.Trim(line, `"`))...)
}

// runServices is process 1 of a node: it reaps, and keeps the services running.
func runServices(ctx context.Context, runtime string) error {
	if err := os.MkdirAll(serviceDir, 0o755); err != nil {
		return err
	}
	for _, s := range services(runtime) {
		go s.keep(ctx)
	}
	process.ReapOrphans(ctx, nil)
	return nil
}

const serviceInterval = 100 * time.Millisecond

func (s service) keep(ctx context.Context) {
	for ctx.Err() == nil {
		if s.wanted() {
			if err := s.run(); err != nil {
				fmt.Fprintln(os.Stderr, time.Now().Format(time.RFC3339Nano), s.name, err)
			}
		}
		time.Sleep(serviceInterval)
	}
}

func (s service) wanted() bool {
	if exists(filepath.Join(serviceDir, s.name+".stop")) {
		return false
	}
	for _, alternatives := range s.needs {
		found := false
		for _, file := range alternatives {
			found = found || exists(file)
		}
		if !found {
			return false
		}
	}
	return true
}

// run runs the service until it ends.
func (s service) run() error {
	log, err := os.OpenFile(filepath.Join("/var/log", s.name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	arguments := s.command()
	command := exec.Command(filepath.Join(nodeBinaries, arguments[0]), arguments[1:]...)
	command.Dir, command.Stdout, command.Stderr = "/", log, log
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := command.Start(); err != nil {
		return err
	}
	pidFile := filepath.Join(serviceDir, s.name+".pid")
	if err := os.WriteFile(pidFile, fmt.Append(nil, command.Process.Pid), 0o644); err != nil {
		return err
	}
	err = command.Wait()
	if removed := os.Remove(pidFile); removed != nil {
		return removed
	}
	if err != nil {
		return fmt.Errorf("ended: %w", err)
	}
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
