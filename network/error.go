package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strings"
	"syscall"

	gocni "github.com/containerd/go-cni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/minicri/minicri/network/runner"
)

var (
	// ErrNoConfiguration: no file of the configuration directory can be used.
	ErrNoConfiguration = errors.New("no CNI configuration")
	// ErrNoAddress: ADD succeeded but gave eth0 no address.
	ErrNoAddress = errors.New("the CNI result has no address for eth0")
)

// PluginError is the failure of one plugin of a run.
type PluginError struct {
	Network, Plugin, Verb string
	// Code and Message are its CNI error (CNI SPEC, "Error"), or what takes the
	// place of one: that it did not answer, or answered with something else.
	Code    uint
	Message string
	// Stderr is the end of what it wrote there.
	Stderr string
	// Advice says what to do about it, "" if there is nothing to say.
	Advice string

	cause error
}

// Error names the plugin, says what it said, and what to do about it.
func (e *PluginError) Error() string {
	text := "plugin " + e.Plugin + ": " + e.Message
	if e.Code != 0 {
		text += fmt.Sprintf(" (CNI error code %d)", e.Code)
	}
	if e.Advice != "" {
		text += ": " + e.Advice
	}
	return text
}

// Unwrap returns what go-cni, or the end of the run's limit, made of it.
func (e *PluginError) Unwrap() error { return e.cause }

// failure is the error of a run: that of each plugin that failed, for all
// verbs but DEL that of the first. err is what go-cni makes of the run, killed
// why it was killed. A DEL has failed if a plugin of its chain has, whatever
// go-cni makes of it.
func failure(run *runner.Run, reports []runner.Report, err, killed error) error {
	if run.Verb == "DEL" && err == nil {
		err = run.Verdict(reports)
	}
	if err == nil && killed == nil {
		return nil
	}
	cause := err
	if killed != nil {
		cause = killed
	}
	var errs []error
	for _, r := range reports {
		if r.Failed() {
			errs = append(errs, newPluginError(run, r, cause, killed))
		}
	}
	if last := len(reports) - 1; len(errs) == 0 && last >= 0 && aboutAnswer(err) {
		reports[last].NoResult = true
		errs = append(errs, newPluginError(run, reports[last], cause, killed))
	}
	switch {
	case len(errs) == 0:
		return explain(cause)
	case run.Verb != "DEL":
		return errs[0]
	}
	if missing := run.Plugins - len(reports); missing > 0 {
		errs = append(errs, fmt.Errorf("%d of the %d plugins did not run", missing, run.Plugins))
	}
	return errors.Join(errs...)
}

// aboutAnswer reports whether libcni could not read what a plugin printed.
func aboutAnswer(err error) bool {
	_, syntax := errors.AsType[*json.SyntaxError](err)
	_, kind := errors.AsType[*json.UnmarshalTypeError](err)
	_, address := errors.AsType[*net.ParseError](err)
	return syntax || kind || address || errors.Is(err, errAnswer) || errors.Is(err, gocni.ErrInvalidResult) || err != nil && strings.Contains(err.Error(), "result version")
}

func newPluginError(run *runner.Run, r runner.Report, cause, killed error) *PluginError {
	e := &PluginError{Network: run.Network, Plugin: r.Plugin, Verb: r.Verb, Code: r.Code, Message: r.Text(), Stderr: r.Stderr, cause: cause}
	switch {
	case !r.Ended && killed != nil:
		e.Message = r.Text() + ": " + killed.Error()
		e.Advice = fmt.Sprintf("find out what it waits for, an agent or a lock; its limit is limits.cni_%s", strings.ToLower(run.Verb))
	case r.NoResult || r.Answer != "":
		e.Message = "it succeeded, and what it printed is no CNI result: " + answerText(r, cause)
		e.Advice = "run a version of the plugin that prints its result and nothing else to stdout"
	default:
		e.Advice = advice(e)
	}
	return e
}

func answerText(r runner.Report, cause error) string {
	const most = 120
	if r.Answer == "" {
		return cause.Error()
	}
	return fmt.Sprintf("%.*q", most, r.Answer)
}

// The texts of IPAM plugins that have no address left: host-local, Calico,
// Cilium, whereabouts, and the VPC plugins of clouds.
var noAddress = []string{
	"no ip addresses available", "no available ip", "no more free ip", "range is full", "no more ips", "could not allocate ip in range",
	"insufficient ip", "no addresses available", "failed to assign an ip address",
}

func advice(e *PluginError) string {
	message := strings.ToLower(e.Message)
	for _, text := range noAddress {
		if strings.Contains(message, text) {
			return fmt.Sprintf("network %q has no free address: remove pods, or give it a larger range", e.Network)
		}
	}
	badRange := strings.Contains(message, "invalid range") || strings.Contains(message, "invalid cidr") || strings.Contains(message, "subnet")
	if e.Code == types.ErrInvalidNetworkConfig || badRange {
		return fmt.Sprintf("correct the configuration of network %q", e.Network)
	}
	return ""
}

// explain adds what libcni leaves out of the text of a plugin's error: the
// error code (CNI SPEC, "Error").
func explain(err error) error {
	plugin, ok := errors.AsType[*types.Error](err)
	if !ok || plugin.Code == 0 {
		return err
	}
	return fmt.Errorf("%w (CNI error code %d)", err, plugin.Code)
}

func inode(info fs.FileInfo) uint64 {
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		return stat.Ino
	}
	return 0
}
