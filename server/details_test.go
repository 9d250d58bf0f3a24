package server

import (
	"fmt"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/network"
)

// What the message says for people the details say for programs.
func TestErrorsHaveFields(t *testing.T) {
	plugin := &network.PluginError{Network: "net", Plugin: "host-local", Verb: "ADD", Code: 11, Message: "no address", Stderr: "last words", Advice: "remove pods"}
	err := grpcError(fmt.Errorf("run sandbox x: %w", &step.Error{Step: "pod/cni add", Err: fmt.Errorf("CNI ADD: %w", plugin)}))
	answer := status.Convert(err)
	if want := "run sandbox x: cni add: CNI ADD: plugin host-local: no address (CNI error code 11): remove pods"; answer.Message() != want || answer.Code() != codes.Unknown {
		t.Errorf("%v %q", answer.Code(), answer.Message())
	}
	if len(answer.Details()) != 2 {
		t.Fatalf("details %v", answer.Details())
	}
	info := answer.Details()[0].(*errdetails.ErrorInfo)
	for key, want := range map[string]string{
		"step": "pod/cni add", "network": "net", "plugin": "host-local", "verb": "ADD", "cni_code": "11", "cni_message": "no address", "advice": "remove pods",
	} {
		if got := info.GetMetadata()[key]; got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
	if info.GetDomain() != "minicri" || info.GetReason() != "CNI_PLUGIN_FAILED" {
		t.Errorf("%v", info)
	}
	if debug := answer.Details()[1].(*errdetails.DebugInfo); debug.GetDetail() != "last words" {
		t.Errorf("%v", debug)
	}
}

// A step that failed without a plugin is named; an error of no step has no fields.
func TestErrorsOfStepsAndOfNone(t *testing.T) {
	failed := status.Convert(grpcError(&step.Error{Step: "container/check", Err: errdefs.ErrNotFound}))
	if failed.Code() != codes.NotFound || len(failed.Details()) != 1 || failed.Details()[0].(*errdetails.ErrorInfo).GetMetadata()["step"] != "container/check" {
		t.Errorf("%v", failed)
	}
	if none := status.Convert(grpcError(errdefs.ErrNotFound)); len(none.Details()) != 0 {
		t.Errorf("%v", none.Details())
	}
	if pull := status.Convert(grpcError(fmt.Errorf("pull x: %w", image.ErrRegistryUnavailable))); pull.Code() != codes.Unknown || len(pull.Message()) < 40 {
		t.Errorf("%v", pull)
	}
}
