package oci

import (
	"reflect"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestImageVolumes(t *testing.T) {
	c := &Container{
		VolumesDir: "/v",
		Image:      Image{Volumes: []string{"/z/", "data", "/"}},
		Config:     &runtimeapi.ContainerConfig{Mounts: []*runtimeapi.Mount{{ContainerPath: "/data/", HostPath: "/d"}}},
	}
	want := []Volume{{ContainerPath: "/z", HostPath: "/v/1"}}
	if got := ImageVolumes(c); !reflect.DeepEqual(got, want) {
		t.Errorf("ImageVolumes = %v, want %v", got, want)
	}
}
