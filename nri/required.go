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

// The kinds of adjustments that Options.Reject can name.
const (
	rejectHooks      = "hooks"
	rejectNamespaces = "namespaces"
	rejectSysctls    = "sysctls"
	rejectSeccomp    = "seccomp"
)

// validation is the library's own validator, with the rules that are in force when
// it is asked. It looks at the annotation required-plugins.noderesource.dev of pods,
// too.
func (p *Plugins) validation() *builtin.BuiltinPlugin {
	return &builtin.BuiltinPlugin{Base: "default-validator", Index: "00", Handlers: builtin.BuiltinHandlers{
		ValidateContainerAdjustment: func(ctx context.Context, request *api.ValidateContainerAdjustmentRequest) error {
			return validator.NewDefaultValidator(rulesOf(p.settings())).ValidateContainerAdjustment(ctx, request)
		},
	}}
}

func rulesOf(o *Options) *validator.DefaultValidatorConfig {
	rejected := func(kind string) bool { return slices.Contains(o.Reject, kind) }
	return &validator.DefaultValidatorConfig{
		Enable:                                true,
		RejectOCIHookAdjustment:               rejected(rejectHooks),
		RejectNamespaceAdjustment:             rejected(rejectNamespaces),
		RejectSysctlAdjustment:                rejected(rejectSysctls),
		RejectRuntimeDefaultSeccompAdjustment: rejected(rejectSeccomp),
		RejectUnconfinedSeccompAdjustment:     rejected(rejectSeccomp),
		RejectCustomSeccompAdjustment:         rejected(rejectSeccomp),
		TolerateMissingAnnotation:             o.Tolerate,
	}
}

// rollName is the builtin plugin that sees which others there are.
const rollName = "minicri"

// roll is a validator that accepts everything. A validator gets the names of
// all connected plugins, which the library gives to no one else.
func roll() *builtin.BuiltinPlugin {
	return &builtin.BuiltinPlugin{Base: rollName, Index: "00", Handlers: builtin.BuiltinHandlers{
		ValidateContainerAdjustment: func(ctx context.Context, request *api.ValidateContainerAdjustmentRequest) error {
			if t, ours := ctx.Value(turnKey{}).(*turn); ours && t.uncounted != nil {
				for _, plugin := range request.GetPlugins() {
					t.connected = append(t.connected, plugin.GetIndex()+"-"+plugin.GetName())
				}
			}
			return nil
		},
	}}
}

// isBuiltin reports whether the plugin is part of this program.
func isBuiltin(plugin string) bool {
	return plugin == "00-"+rollName || plugin == "00-default-validator"
}

// Connected are the plugins that are there now, as INDEX-NAME, in the order in
// which they are asked. A request goes through the library for that, but to no
// plugin.
func (p *Plugins) Connected(ctx context.Context) []string {
	a := p.adaptation.Load()
	if a == nil {
		return nil
	}
	t := &turn{adaptation: a, uncounted: &p.uncounted}
	// What validators in the plugins would say is of no interest.
	_, _ = a.CreateContainer(context.WithValue(ctx, turnKey{}, t), &adaptation.CreateContainerRequest{
		Pod: &api.PodSandbox{}, Container: &api.Container{},
	})
	return slices.DeleteFunc(t.connected, isBuiltin)
}

// checkRequired fails for a pod that may not do without a plugin that is absent.
func (p *Plugins) checkRequired(ctx context.Context, pod *api.PodSandbox, container string) error {
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
	connected := p.Connected(ctx)
	var missing []string
	for _, required := range rules.Required {
		if !slices.ContainsFunc(connected, func(plugin string) bool { return isNamed(plugin, required) }) {
			missing = append(missing, required)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("the required NRI plugin %s is not connected (nri.required_plugins): %w", strings.Join(missing, ", "), errdefs.ErrUnavailable)
}

// isNamed: a plugin is required by its name, with its index or without.
func isNamed(plugin, required string) bool {
	_, name, _ := strings.Cut(plugin, "-")
	return plugin == required || name == required
}

// measures takes what the library says of each request to a plugin.
type measures struct{ plugins *Plugins }

func (m measures) RecordPluginLatency(plugin, request string, took time.Duration) {
	if !isBuiltin(plugin) && m.plugins.uncounted.Load() == 0 {
		m.plugins.options.Metrics.NRILatency(plugin, request, took)
	}
}

// RecordPluginInvocation is the last that is said of a request. While uncounted
// ones are made, there are no others: the library holds its lock all the time.
func (m measures) RecordPluginInvocation(plugin, request string, err error) {
	switch {
	case isBuiltin(plugin):
	case m.plugins.uncounted.Load() > 0:
		m.plugins.uncounted.Add(-1)
	default:
		m.plugins.options.Metrics.NRIRequest(plugin, request, outcome(err))
		blame(plugin, err)
	}
}

func (m measures) RecordPluginAdjustments(string, string, *adaptation.ContainerAdjustment, int, int) {
}

func (m measures) UpdatePluginCount(count int) {
	const builtins = 2
	m.plugins.options.Metrics.NRIPlugins(max(0, count-builtins))
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

// answerError is the error with which one request to a plugin ended. The library
// passes it on as it is, or wrapped, and says meanwhile whose it is.
type answerError struct {
	err    error
	plugin string // "" until the library has said it
}

func (e *answerError) Error() string { return e.err.Error() }

func (e *answerError) Unwrap() error { return e.err }

// blame notes whose error it is: the library returns it without a name.
func blame(plugin string, err error) {
	if answer, ok := errors.AsType[*answerError](err); ok {
		answer.plugin = plugin
	}
}

// named adds the plugin's name to its error.
func named(err error) error {
	if err == nil {
		return nil
	}
	if answer, ok := errors.AsType[*answerError](err); ok && answer.plugin != "" {
		return fmt.Errorf("NRI plugin %s: %w", answer.plugin, err)
	}
	return fmt.Errorf("NRI: %w", err)
}
