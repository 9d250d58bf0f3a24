package container

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// An environment that no program can be executed with is refused before
// anything is written; the largest one that is none is passed on.
func TestEnvironmentBeyondWhatExecTakes(t *testing.T) {
	p := newPod(t)
	before := p.Look()
	variable := func(size int) option { return env("LARGE", strings.Repeat("x", size)) }
	for name, beyond := range map[string]option{
		"LARGE":          variable(128 << 10),
		"many variables": func(c *runtimeapi.ContainerConfig) { c.Envs = repeated(64, 100<<10) },
		"many arguments": func(c *runtimeapi.ContainerConfig) {
			c.Args = slices.Repeat([]string{strings.Repeat("x", 100<<10)}, 100)
		},
	} {
		_, err := p.tryCreate(shell("app", "true", beyond, func(c *runtimeapi.ContainerConfig) { c.LogPath = "" }))
		wantCode(t, err, codes.InvalidArgument)
		if err == nil || name == "LARGE" && !strings.Contains(err.Error(), name) || len(err.Error()) > 1000 {
			t.Errorf("%s: the error does not name it: %.1000v", name, err)
		}
	}
	for _, left := range p.Differences(before) {
		t.Error(left)
	}
	const largest = 128<<10 - 100
	id := p.run("app", "echo ${#LARGE}; exit 1", func(c *runtimeapi.ContainerConfig) { c.Envs = repeated(10, 100<<10) }, variable(largest))
	p.wantExit(id, 1, "Error")
	p.awaitLine(id, "130972")
	if got := p.info(id).RuntimeSpec.Process.Args; len(got) != 3 {
		t.Errorf("arguments in the verbose status: %q", got)
	}
}

func repeated(count, size int) (envs []*runtimeapi.KeyValue) {
	for i := range count {
		envs = append(envs, &runtimeapi.KeyValue{Key: fmt.Sprintf("A%d", i), Value: []byte(strings.Repeat("x", size))})
	}
	return envs
}
