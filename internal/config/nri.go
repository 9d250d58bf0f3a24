package config

import (
	"regexp"
	"slices"
)

// pluginName is the name of an NRI plugin, with its index or without, as the
// library takes it (api.CheckPluginName).
var pluginName = regexp.MustCompile(`^([0-9]{2}-)?[A-Za-z0-9_.-]+$`)

// nriAdjustments are what nri.reject can name.
func nriAdjustments() []string { return []string{"hooks", "namespaces", "sysctls", "seccomp"} }

func (p *problems) checkNRI(n *NRI) {
	if len(n.Socket) > longestSocket {
		p.add("nri.socket", "%q is longer than the %d characters that a unix socket can have", n.Socket, longestSocket)
	}
	for _, name := range n.Required {
		if !pluginName.MatchString(name) {
			p.add("nri.required_plugins", "%q is no name of a plugin: write it as in 'dranet' or '10-dranet'", name)
		}
	}
	for _, kind := range n.Reject {
		if !slices.Contains(nriAdjustments(), kind) {
			p.add("nri.reject", "%q is not one of %q", kind, nriAdjustments())
		}
	}
}
