package server

import (
	"encoding/json"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// cri: Version VersionRequest.version VersionResponse.runtime_api_version VersionResponse.runtime_name
// cri: VersionResponse.runtime_version VersionResponse.version
func TestVersion(t *testing.T) {
	client := dial(t, restored(t))
	version, err := client.Version(t.Context(), &runtimeapi.VersionRequest{Version: "0.1.0"})
	must(t, err)
	if version.GetVersion() != "0.1.0" || version.GetRuntimeName() != "minicri" || version.GetRuntimeVersion() != "1.2.3" || version.GetRuntimeApiVersion() != "v1" {
		t.Errorf("version %v", version)
	}
}

// A node without a network says so, with what to do about it.
//
// cri: RuntimeCondition.reason
func TestStatus(t *testing.T) {
	client := dial(t, restored(t))
	response, err := client.Status(t.Context(), &runtimeapi.StatusRequest{Verbose: true})
	must(t, err)
	conditions := response.GetStatus().GetConditions()
	if len(conditions) != 3 || conditions[0].GetType() != runtimeapi.RuntimeReady || !conditions[0].GetStatus() {
		t.Fatalf("conditions %v", conditions)
	}
	if n := conditions[1]; n.GetType() != runtimeapi.NetworkReady || n.GetStatus() || n.GetReason() == "" || !strings.Contains(n.GetMessage(), "default_network.enabled") {
		t.Errorf("network condition %v", n)
	}
	if h := conditions[2]; h.GetType() != "RuntimeHandlerReady/runc" || !h.GetStatus() {
		t.Errorf("condition of a handler %v", h)
	}
	if handlers := response.GetRuntimeHandlers(); len(handlers) != 2 || handlers[0].GetName() != "" || handlers[1].GetName() != "runc" {
		t.Errorf("handlers %v", handlers)
	}
	for key, value := range response.GetInfo() {
		// crictl shows an object as it is, and anything else as text with its quotes escaped.
		if !json.Valid([]byte(value)) || !strings.HasPrefix(value, "{") && key != "golang" && key != "config" {
			t.Errorf("info %s is no JSON object: %s", key, value)
		}
	}
	if _, has := response.GetInfo()["runtimeHandlers"]; has {
		t.Error("info hides crictl's own list of runtimeHandlers")
	}
	for _, key := range []string{"config", "handlers", "building", "networkProblems", "pendingAttachments", "quarantinedRecords"} {
		if _, has := response.GetInfo()[key]; !has {
			t.Errorf("info has no %s", key)
		}
	}
}

// cri: NetworkConfig.pod_cidr RuntimeConfig.network_config UpdateRuntimeConfig
// cri: UpdateRuntimeConfigRequest.runtime_config
func TestUpdateRuntimeConfig(t *testing.T) {
	runtime := restored(t)
	client := dial(t, runtime)
	for _, test := range []struct {
		cidr, then string
		code       codes.Code
	}{
		{"10.91.0.0/24,fd91::/64", "10.91.0.0/24,fd91::/64", codes.OK},
		{"", "10.91.0.0/24,fd91::/64", codes.OK},
		{"10.91.0.0", "10.91.0.0/24,fd91::/64", codes.InvalidArgument},
		{"10.92.0.0/24", "10.92.0.0/24", codes.OK},
	} {
		_, err := client.UpdateRuntimeConfig(t.Context(), &runtimeapi.UpdateRuntimeConfigRequest{
			RuntimeConfig: &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: test.cidr}},
		})
		wantCode(t, err, test.code)
		if got := runtime.Networks.PodCIDR(); got != test.then {
			t.Errorf("after %q the pod CIDR is %q, want %q", test.cidr, got, test.then)
		}
	}
	_, err := client.UpdateRuntimeConfig(t.Context(), &runtimeapi.UpdateRuntimeConfigRequest{})
	wantCode(t, err, codes.OK)
}

// A node whose SELinux policy knows no containers says so; others have no such
// condition.
func TestStatusWithoutAContainerPolicy(t *testing.T) {
	runtime := restored(t)
	runtime.Info.Machine.SELinuxProblem = "install container-selinux"
	response, err := dial(t, runtime).Status(t.Context(), &runtimeapi.StatusRequest{})
	must(t, err)
	conditions := response.GetStatus().GetConditions()
	if len(conditions) != 4 || conditions[3].GetType() != containerSELinuxReady || conditions[3].GetStatus() || conditions[3].GetMessage() != "install container-selinux" {
		t.Errorf("conditions %v", conditions)
	}
}

// A list that is empty is one, and not null.
func TestEmptyListsOfVerboseAnswers(t *testing.T) {
	var none []string
	info, err := encodeInfo(map[string]any{"quarantinedRecords": none, "version": "1"})
	if err != nil || info["quarantinedRecords"] != `{"items":[]}` || info["version"] != `"1"` {
		t.Errorf("%v, %v", info, err)
	}
}
