package nri

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/adaptation/builtin"
	"github.com/containerd/nri/pkg/api"
	nrinet "github.com/containerd/nri/pkg/net"
	nriplugin "github.com/containerd/nri/pkg/plugin"
	validator "github.com/containerd/nri/plugins/default-validator"
	"github.com/containerd/ttrpc"

	"github.com/minicri/minicri/internal/process"
)

// validation is the library's own validator, with the rules in force when it is asked.
func (p *Plugins) validation() *builtin.BuiltinPlugin {
	validate := func(ctx context.Context, request *api.ValidateContainerAdjustmentRequest) error {
		rules := p.settings()
		rejected := func(kind string) bool { return slices.Contains(rules.Reject, kind) }
		return validator.NewDefaultValidator(&validator.DefaultValidatorConfig{
			Enable:                                true,
			RejectOCIHookAdjustment:               rejected("hooks"),
			RejectNamespaceAdjustment:             rejected("namespaces"),
			RejectSysctlAdjustment:                rejected("sysctls"),
			RejectRuntimeDefaultSeccompAdjustment: rejected("seccomp"),
			RejectUnconfinedSeccompAdjustment:     rejected("seccomp"),
			RejectCustomSeccompAdjustment:         rejected("seccomp"),
			TolerateMissingAnnotation:             rules.Tolerate,
		}).ValidateContainerAdjustment(ctx, request)
	}
	return &builtin.BuiltinPlugin{
		Base: "default-validator", Index: "00",
		Handlers: builtin.BuiltinHandlers{ValidateContainerAdjustment: validate},
	}
}

// Connected returns the connected plugins as INDEX-NAME, in the order in which they are asked.
func (p *Plugins) Connected() (names []string) {
	d := p.door.Load()
	if d == nil {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for l := range d.links {
		if l.joined {
			names = append(names, l.name)
		}
	}
	slices.Sort(names)
	return names
}

// checkRequired fails if a plugin is absent that the pod must not do without.
func (p *Plugins) checkRequired(pod *api.PodSandbox, container string) error {
	missing := p.missing(p.Connected())
	if len(missing) == 0 {
		return nil
	}
	if key := p.settings().Tolerate; key != "" {
		value, _ := nriplugin.GetEffectiveAnnotation(pod, key, container)
		if tolerated, _ := strconv.ParseBool(value); tolerated {
			return nil
		}
	}
	return fmt.Errorf("the required NRI plugin %s is not connected (nri.required_plugins): %w", strings.Join(missing, ", "), errdefs.ErrUnavailable)
}

// missing returns the required plugins, with index or without, that are not connected.
func (p *Plugins) missing(connected []string) (missing []string) {
	for _, required := range p.settings().Required {
		is := func(plugin string) bool {
			_, name, _ := strings.Cut(plugin, "-")
			return plugin == required || name == required
		}
		if !slices.ContainsFunc(connected, is) {
			missing = append(missing, required)
		}
	}
	return missing
}

const validatorName = "00-default-validator"

// measures receives the library's report of each request to a plugin.
type measures struct{ plugins *Plugins }

func (m measures) RecordPluginLatency(plugin, request string, took time.Duration) {
	if plugin != validatorName {
		m.plugins.options.Metrics.NRILatency(plugin, request, took)
	}
}

// RecordPluginInvocation runs under Plugins.asking, or while the plugin is synchronized.
func (m measures) RecordPluginInvocation(plugin, request string, err error) {
	if plugin == validatorName {
		return
	}
	m.plugins.options.Metrics.NRIRequest(plugin, request, outcome(err))
	if err != nil {
		m.plugins.failed, m.plugins.failedBy = err, plugin
	}
}

func (m measures) RecordPluginAdjustments(plugin, _ string, _ *adaptation.ContainerAdjustment, updates, _ int) {
	if updates > 0 {
		m.plugins.updaters = append(m.plugins.updaters, plugin)
	}
}

func (m measures) UpdatePluginCount(count int) {
	m.plugins.options.Metrics.NRIPlugins(max(0, count-1)) // without the validator
}

func outcome(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	case errors.Is(err, ttrpc.ErrClosed), errors.Is(err, ttrpc.ErrServerClosed), errors.Is(err, ttrpc.ErrProtocol):
		return "lost"
	default:
		return "error"
	}
}

// Survey returns the plugins that can be started, as INDEX-NAME, and what is wrong with the others.
func (s Source) Survey() (plugins []string, problems []error) {
	if !s.Enabled {
		return nil, nil
	}
	entries, err := os.ReadDir(s.PluginDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		problems = append(problems, fmt.Errorf("no NRI plugin is started (nri.plugin_dir): %w", err))
	}
	for _, entry := range entries {
		if info, err := entry.Info(); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			continue // no program, or just removed
		}
		if _, err := s.configurationOf(entry.Name()); err != nil {
			problems = append(problems, fmt.Errorf("NRI plugin %s is not started: %w", filepath.Join(s.PluginDir, entry.Name()), err))
			continue
		}
		plugins = append(plugins, entry.Name())
	}
	return plugins, problems
}

// configurationOf returns a plugin's configuration, "" for none. It fails if it cannot be started.
func (s Source) configurationOf(file string) (string, error) {
	index, name, err := api.ParsePluginName(file)
	if err != nil {
		return "", fmt.Errorf("its name is not an index of two digits, '-' and a name, as in 10-logger: %w", err)
	}
	for _, configuration := range []string{index + "-" + name, name} {
		path := filepath.Join(s.ConfigDir, configuration+".conf")
		info, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil && !info.Mode().IsRegular() { // reading a FIFO would hang
			err = fmt.Errorf("%s is no regular file", path)
		}
		if err != nil {
			return "", fmt.Errorf("its configuration: %w", err)
		}
		content, err := os.ReadFile(path)
		return string(content), err
	}
	return "", nil
}

// launchAll starts the plugins of the directory side by side, and waits until each joins or fails.
func (p *Plugins) launchAll(d *door, source Source) {
	plugins, problems := source.Survey()
	var links []*link
	for _, plugin := range plugins {
		l, err := launch(source, plugin)
		if err != nil {
			problems = append(problems, fmt.Errorf("NRI plugin %s is not started: %w", filepath.Join(source.PluginDir, plugin), err))
			continue
		}
		links = append(links, l)
		d.enter(l)
	}
	for _, problem := range problems {
		p.options.Logger.Warn("an NRI plugin is skipped", "err", problem)
	}
	d.mu.Lock()
	d.skipped = problems
	for _, l := range links {
		d.launched = append(d.launched, l.name)
	}
	d.mu.Unlock()
	for _, l := range links {
		<-l.settled
	}
}

// launch starts a plugin in its own process group, connected by its descriptor 3.
func launch(source Source, plugin string) (*link, error) {
	config, err := source.configurationOf(plugin)
	if err != nil {
		return nil, err
	}
	index, name, _ := api.ParsePluginName(plugin) // as configurationOf has
	l := &link{name: plugin, config: config}
	pair, err := nrinet.NewSocketPair()
	if err != nil {
		return nil, err
	}
	defer pair.Close()
	if l.plugin, err = pair.LocalConn(); err != nil {
		return nil, err
	}
	l.command = exec.Command(filepath.Join(source.PluginDir, plugin))
	l.command.ExtraFiles = []*os.File{pair.PeerFile()}
	l.command.Env = []string{api.PluginNameEnvVar + "=" + name, api.PluginIdxEnvVar + "=" + index, api.PluginSocketEnvVar + "=3"}
	l.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := l.command.Start(); err != nil {
		_ = l.plugin.Close()
		return nil, err
	}
	l.release = process.Claim(l.command.Process.Pid)
	return l, nil
}

// Problems returns the errors of plugins that were skipped, and of those that should be connected.
func (p *Plugins) Problems(connected []string) (problems []error) {
	problem := func(format, plugin string) { problems = append(problems, fmt.Errorf(format, plugin)) }
	if d := p.door.Load(); d != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		problems = append(problems, d.skipped...)
		for _, plugin := range d.launched {
			if !slices.Contains(connected, plugin) {
				problem("NRI plugin %s is not connected: it did not start, or has ended; the log says why", plugin)
			}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken != nil {
		problems = append(problems, fmt.Errorf("NRI plugins cannot connect to minicri: %w; then send SIGHUP", p.taken))
	}
	for plugin := range p.away {
		if !slices.Contains(connected, plugin) {
			problem("NRI plugin %s was disconnected when NRI was switched off or over, and has not come back: start it again, or restart minicri if it is to stay away", plugin)
		}
	}
	for _, required := range p.missing(connected) {
		problem("the required NRI plugin %s is not connected (nri.required_plugins): pods are refused", required)
	}
	return problems
}
