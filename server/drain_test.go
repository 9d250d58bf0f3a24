package server

import (
	"path"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Every call that the daemon serves either changes nothing, which its name says,
// or is waited for at a shutdown.
func TestCallsThatChangeSomethingAreWaitedFor(t *testing.T) {
	reading := []string{
		"List", "Stream", "Status", "Version", "RuntimeConfig", "PodSandboxStatus", "PodSandboxStats", "ContainerStatus", "ContainerStats",
		"GetContainerEvents", "ImageStatus", "ImageFsInfo",
		"Exec", "Attach", "PortForward", // they make URLs; the sessions are the stream server's
	}
	server := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(server, &Runtime{})
	runtimeapi.RegisterImageServiceServer(server, &ImageServer{})
	served := 0
	for _, service := range server.GetServiceInfo() {
		for _, method := range service.Methods {
			served++
			name := path.Base(method.Name)
			reads := slices.Contains(reading, name) || strings.HasPrefix(name, "List") || strings.HasPrefix(name, "Stream")
			if reads == slices.Contains(changing, name) {
				t.Errorf("%s: is in the list of calls that change something: %v", name, !reads)
			}
		}
	}
	if served < 40 {
		t.Errorf("%d calls are served", served)
	}
}
