package server

import (
	"errors"
	"strconv"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/network"
)

// errorDomain is the domain of our errdetails.ErrorInfo.
const errorDomain = "minicri"

// withDetails is a status error that says in fields, for programs, what its
// message says for people: ErrorInfo has the step ("pod/cni add") and, where a
// CNI plugin is to blame, network, plugin, caller, verb, code, message and
// advice; DebugInfo has the end of the plugin's stderr.
func withDetails(code codes.Code, text string, err error) error {
	plain := status.New(code, text)
	info := &errdetails.ErrorInfo{Domain: errorDomain, Reason: "STEP_FAILED", Metadata: make(map[string]string)}
	var failed *step.Error
	if errors.As(err, &failed) {
		info.Metadata["step"] = string(failed.Step)
	}
	details := []protoadapt.MessageV1{}
	var plugin *network.PluginError
	if errors.As(err, &plugin) {
		info.Reason = "CNI_PLUGIN_FAILED"
		describePlugin(info.Metadata, plugin)
		if plugin.Stderr != "" {
			details = append(details, &errdetails.DebugInfo{Detail: plugin.Stderr})
		}
	}
	if len(info.Metadata) == 0 {
		return plain.Err()
	}
	detailed, err := plain.WithDetails(append([]protoadapt.MessageV1{info}, details...)...)
	if err != nil {
		return plain.Err()
	}
	return detailed.Err()
}

func describePlugin(to map[string]string, e *network.PluginError) {
	for key, value := range map[string]string{
		"network": e.Network, "plugin": e.Plugin, "caller": e.Caller, "verb": e.Verb, "cni_message": e.Message, "advice": e.Advice,
	} {
		if value != "" {
			to[key] = value
		}
	}
	if e.Code != 0 {
		to["cni_code"] = strconv.FormatUint(uint64(e.Code), 10)
	}
}
