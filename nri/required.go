package nri

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/adaptation/builtin"
	"github.com/containerd/nri/pkg/api"
	nriplugin "github.com/containerd/nri/pkg/plugin"
	validator "github.com/containerd/nri/plugins/default-validator"
	"github.com/containerd/ttrpc"
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
