package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/docker/go-units"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/nri"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/stream"
)

func readDefaults(c *config.Config, m machine.Machine) (oci.Defaults, error) {
	d := oci.Defaults{
		Env: c.DefaultEnv, Sysctls: make(map[string]string), DeviceOwnership: c.DeviceOwnership, CgroupWritable: c.CgroupWritable,
		PodAnnotations: c.PodAnnotations, ContainerAnnotations: c.ContainerAnnotations,
		Capabilities: oci.CapabilityNames(c.DefaultCapabilities), Seccomp: c.DefaultSeccomp, AppArmor: c.DefaultAppArmor,
	}
	filter, appArmor := d.Profiles()
	if err := validate.Seccomp(filter); err != nil {
		return d, fmt.Errorf("default_seccomp: %w", err)
	}
	if err := validate.AppArmor(appArmor, m); err != nil {
		return d, fmt.Errorf("default_apparmor: %w", err)
	}
	for _, name := range d.Capabilities {
		if name != oci.AllCapabilities && !machine.IsCapability(name) {
			return d, fmt.Errorf("default_capabilities: there is no %s", name)
		}
	}
	if c.CgroupWritable && !m.CgroupDelegation {
		return d, fmt.Errorf("cgroup_writable: a container could write to cgroups that are not its own: it needs cgroup v2 mounted with nsdelegate")
	}
	for _, text := range c.DefaultUlimits {
		limit, err := units.ParseUlimit(text)
		if err != nil {
			return d, fmt.Errorf("default_ulimits: %w", err)
		}
		d.Rlimits = append(d.Rlimits, specs.POSIXRlimit{Type: "RLIMIT_" + strings.ToUpper(limit.Name), Soft: uint64(limit.Soft), Hard: uint64(limit.Hard)})
	}
	for _, pair := range c.DefaultSysctls {
		name, value, _ := strings.Cut(pair, "=")
		if oci.SysctlNamespace(name) == "" {
			return d, fmt.Errorf("default_sysctls: %s is not a parameter of a pod's namespace, it would change the node", name)
		}
		d.Sysctls[name] = value
	}
	var err error
	d.Base, err = readBase("base_spec", c.BaseSpec, nil)
	return d, err
}

// handlerDefaults adds the keys of each runtime handler to the node's defaults.
func handlerDefaults(c *config.Config, all oci.Defaults) (map[string]oci.Defaults, error) {
	of := make(map[string]oci.Defaults)
	for name, runtime := range c.Runtimes {
		d := all
		d.PrivilegedWithoutHostDevices, d.OwnSandbox = runtime.PrivilegedWithoutHostDevices, runtime.SandboxPerContainer
		d.PodAnnotations = slices.Concat(all.PodAnnotations, runtime.PodAnnotations)
		d.ContainerAnnotations = slices.Concat(all.ContainerAnnotations, runtime.ContainerAnnotations)
		var err error
		if d.Base, err = readBase("runtimes."+name+".base_spec", runtime.BaseSpec, all.Base); err != nil {
			return nil, err
		}
		of[name] = d
	}
	if c.DefaultRuntime != "" {
		of[""] = of[c.DefaultRuntime]
	}
	return of, nil
}

func readBase(key, path string, otherwise *specs.Spec) (*specs.Spec, error) {
	if path == "" {
		return otherwise, nil
	}
	data, err := state.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	base := &specs.Spec{}
	if err := json.Unmarshal(data, base); err != nil {
		return nil, fmt.Errorf("%s: %s: %w", key, path, err)
	}
	return base, nil
}

// preflight returns the values that a daemon refuses on this machine, apart from what Config.Check and
// obstacles find. Each error begins with its key; some may be nil.
func preflight(c *config.Config, m machine.Machine) (problems []error) {
	if c.CgroupDriver == "systemd" && !systemdRuns() {
		problems = append(problems, fmt.Errorf("cgroup_driver: systemd does not run here (there is no /run/systemd/system), so no pod could be started: write 'cgroupfs', for the kubelet too"))
	}
	defaults, err := readDefaults(c, m)
	_, handlersErr := handlerDefaults(c, defaults)
	return append(problems, err, handlersErr, about("cgroup_parent", validate.CgroupParent(c.CgroupParent, systemdCgroup(c))),
		about("streaming.tls_cert, streaming.tls_key", stream.TLS{Cert: c.Streaming.TLSCert, Key: c.Streaming.TLSKey}.Check()),
		about("metrics_tls_cert, metrics_tls_key", stream.TLS{Cert: c.MetricsCert, Key: c.MetricsKey}.Check()))
}

func about(key string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", key, err)
}

// obstacles returns what else would stop the start of a daemon, or of its metrics. It makes nothing. running is from
// runningConfig: what that daemon uses is no obstacle. Each error begins with its key; some may be nil.
func obstacles(ctx context.Context, c *config.Config, running map[string]any) (problems []error) {
	problems = []error{
		about("root", canMake(c.Root, true)), about("state", canMake(c.State, false)),
		about("netns_dir", canMake(c.NetnsDir, false)), about("socket", canMake(filepath.Dir(c.Socket), false)),
	}
	if identity, err := node.Read(c.Root); err == nil { // 'minicri check' reports one that cannot be read
		problems = append(problems, identity.Fits(c.Root, c.State, c.NetnsDir))
	}
	// Only root can ask the daemon what it has.
	serves, unprivileged := running != nil, os.Geteuid() != 0
	if err := socket.CheckFree(c.Socket); !errors.Is(err, socket.ErrInUse) {
		problems = append(problems, about("socket", err))
	}
	// '' is any free port.
	for key, address := range map[string]string{"streaming.address": c.Streaming.Address, "metrics_address": c.Metrics} {
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
		if err == nil {
			err = listener.Close()
		}
		if !errors.Is(err, unix.EADDRINUSE) || !serves && !unprivileged {
			problems = append(problems, about(key, err))
		}
	}
	if c.NRI.Enabled && c.NRI.Socket != "" {
		problems = append(problems, about("nri.socket", canMake(filepath.Dir(c.NRI.Socket), false)))
		if err := nri.CheckSocket(c.NRI.Socket); !errors.Is(err, socket.ErrInUse) { // then the daemon works without plugins
			problems = append(problems, err) // it begins with the key
		}
	}
	return problems
}

// canMake fails if a directory neither exists nor can be made, or cannot be written to, or, with runs, if no
// program can be executed there.
func canMake(directory string, runs bool) error {
	above := filepath.Clean(directory)
	info, err := os.Stat(above)
	for errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(above); err == nil {
			return fmt.Errorf("%s is a link that leads nowhere", above)
		}
		above = filepath.Dir(above)
		info, err = os.Stat(above)
	}
	if err == nil && !info.IsDir() {
		err = &fs.PathError{Op: "mkdir", Path: above, Err: unix.ENOTDIR}
	}
	var found unix.Statfs_t
	if err == nil {
		err = cmp.Or(unix.Statfs(above, &found), os.NewSyscallError("write to "+above, unix.Access(above, unix.W_OK|unix.X_OK)))
	}
	if err == nil && runs && found.Flags&unix.ST_NOEXEC != 0 {
		err = fmt.Errorf("%s is mounted noexec, so no pod could run", above)
	}
	if err == nil && slices.Contains([]int64{unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEVPTS_SUPER_MAGIC, unix.DEBUGFS_MAGIC, unix.SECURITYFS_MAGIC}, int64(found.Type)) {
		err = fmt.Errorf("%s is on a file system of the kernel's, where no file can be made", above)
	}
	if os.Geteuid() != 0 && errors.Is(err, fs.ErrPermission) {
		return nil // the daemon is root
	}
	return err
}

func located(l *config.Loaded, problems []error) []error {
	problems = slices.DeleteFunc(problems, func(err error) bool { return err == nil })
	for i, problem := range problems {
		problems[i] = l.Locate(problem)
	}
	return problems
}

// systemdRuns reports whether systemd manages this machine (sd_booted(3)).
func systemdRuns() bool {
	_, err := os.Stat("/run/systemd/system")
	return err == nil
}

func readMachine(ctx context.Context, root string, logger *slog.Logger) (machine.Machine, error) {
	m, err := machine.Read(root)
	if err != nil {
		return m, err
	}
	if !m.CanLowerOOMAdj {
		logger.Warn("no CAP_SYS_RESOURCE: processes get no lower oom_score_adj than the daemon has", "oom_score_adj", m.OOMScoreAdj)
	}
	if !m.AppArmor {
		logger.Info("no AppArmor, or no apparmor_parser: profiles of the kind RuntimeDefault confine nothing here")
		return m, nil
	}
	if err := machine.LoadDefaultProfile(ctx); err != nil {
		logger.Warn("AppArmor confines nothing here", "err", err)
		m.AppArmor = false
	}
	return m, nil
}

func findShim(path string) (string, error) {
	if path == "" {
		self, err := os.Executable()
		if err != nil {
			return "", err
		}
		path = filepath.Join(filepath.Dir(self), "minicri-shim")
	}
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no file", path)
	}
	if err != nil {
		return "", fmt.Errorf("minicri-shim: %w: install it in the directory of minicri, or give --shim", err)
	}
	return path, nil
}

// systemdCgroup reports whether the cgroup driver is systemd, the default where that runs with cgroup v2.
func systemdCgroup(c *config.Config) bool {
	if c.CgroupDriver != "" {
		return c.CgroupDriver == "systemd"
	}
	return systemdRuns() && cgroup.Unified()
}

func cgroupParent(c *config.Config, systemd bool) string {
	if c.CgroupParent == "" && systemd {
		return "system.slice"
	}
	return cmp.Or(c.CgroupParent, "/minicri")
}
