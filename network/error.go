package network

import (
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/minicri/minicri/internal/step"
)

// PluginError is the failure of one plugin of a run.
type PluginError struct {
	Network string
	// Plugin is what the run came to. Its Message is also what takes the place of a CNI
	// error: that it did not answer, or answered with something else.
	step.Plugin
	// Advice says what to do about it, "" if there is nothing to say.
	Advice string

	cause error
}

// Error names the plugin, says what it said, and what to do about it.
func (e *PluginError) Error() string {
	text := "plugin " + e.Name + ": " + e.Message
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
