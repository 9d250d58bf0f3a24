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
	"google.golang.org/grpc/status"
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

// missing are the required plugins that are not connected.
func (p *Plugins) missing(connected []string) (missing []string) {
	for _, required := range p.settings().Required {
		if !slices.ContainsFunc(connected, func(plugin string) bool { return isNamed(plugin, required) }) {
			missing = append(missing, required)
		}
	}
	return missing
}

// isNamed: a plugin is required by its name, with its index or without.
func isNamed(plugin, required string) bool {
	_, name, _ := strings.Cut(plugin, "-")
	return plugin == required || name == required
}

// validator is the library's own plugin, which is part of this program.
const validatorName = "00-default-validator"

// measures takes what the library says of each request to a plugin.
type measures struct{ plugins *Plugins }

func (m measures) RecordPluginLatency(plugin, request string, took time.Duration) {
	if plugin != validatorName {
		m.plugins.options.Metrics.NRILatency(plugin, request, took)
	}
}

// RecordPluginInvocation is the last that is said of a request.
func (m measures) RecordPluginInvocation(plugin, request string, err error) {
	if plugin != validatorName {
		m.plugins.options.Metrics.NRIRequest(plugin, request, outcome(err))
		blame(plugin, err)
	}
}

// RecordPluginAdjustments is said of an answer. Plugins.asking is held, or the plugin
// is just synchronized.
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

// answered is how a question to a plugin has ended.
func answered(response *ttrpc.Response, err error) error {
	if err == nil {
		err = status.ErrorProto(response.GetStatus()) // what ttrpc makes of it
	}
	if err != nil {
		return &answerError{err: err}
	}
	return nil
}

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
