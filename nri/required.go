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

// validation is the library's own validator, with the rules that are in force when
// it is asked. It looks at the annotation required-plugins.noderesource.dev of pods,
// too.
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

// Connected are the plugins that are there now, as INDEX-NAME, in the order in
// which they are asked.
func (p *Plugins) Connected() []string {
	if d := p.door.Load(); d != nil {
		return d.connected()
	}
	return nil
}

// checkRequired fails for a pod that may not do without a plugin that is absent.
func (p *Plugins) checkRequired(pod *api.PodSandbox, container string) error {
	rules := p.settings()
	if len(rules.Required) == 0 {
		return nil
	}
	if key := rules.Tolerate; key != "" {
		if value, set := nriplugin.GetEffectiveAnnotation(pod, key, container); set {
			if tolerated, err := strconv.ParseBool(value); err == nil && tolerated {
				return nil
			}
		}
	}
	missing := p.missing(p.Connected())
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("the required NRI plugin %s is not connected (nri.required_plugins): %w", strings.Join(missing, ", "), errdefs.ErrUnavailable)
}

// missing are the required plugins that are not connected, by their name, with the
// index or without.
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

// validatorName is the library's own plugin, which is part of this program.
const validatorName = "00-default-validator"

// measures takes what the library says of each request to a plugin.
type measures struct{ plugins *Plugins }

func (m measures) RecordPluginLatency(plugin, request string, took time.Duration) {
	if plugin != validatorName {
		m.plugins.options.Metrics.NRILatency(plugin, request, took)
	}
}

// RecordPluginInvocation is said of each answer. Plugins.asking is held, or the plugin
// is just synchronized.
func (m measures) RecordPluginInvocation(plugin, request string, err error) {
	if plugin == validatorName {
		return
	}
	m.plugins.options.Metrics.NRIRequest(plugin, request, outcome(err))
	if err != nil {
		m.plugins.failed = failure{plugin, err}
	}
}

// RecordPluginAdjustments is said after that.
func (m measures) RecordPluginAdjustments(plugin, _ string, _ *adaptation.ContainerAdjustment, updates, _ int) {
	if updates > 0 {
		m.plugins.updaters = append(m.plugins.updaters, plugin)
	}
}

func (m measures) UpdatePluginCount(count int) {
	const builtins = 1
	m.plugins.options.Metrics.NRIPlugins(max(0, count-builtins))
}

func outcome(err error) string {
	is := func(target error) bool { return errors.Is(err, target) }
	switch {
	case err == nil:
		return "ok"
	case is(context.DeadlineExceeded):
		return "timeout"
	case is(ttrpc.ErrClosed), is(ttrpc.ErrServerClosed), is(ttrpc.ErrProtocol):
		return "lost"
	default:
		return "error"
	}
}

// failure is an answer of a plugin that was an error.
type failure struct {
	plugin string
	err    error
}

// named adds the plugin's name to its error: the library returns it without, as it is
// or wrapped. p.asking is held.
func (p *Plugins) named(err error) error {
	if err == nil {
		return nil
	}
	if p.failed.err != nil && errors.Is(err, p.failed.err) {
		return fmt.Errorf("NRI plugin %s: %w", p.failed.plugin, err)
	}
	return fmt.Errorf("NRI: %w", err)
}
