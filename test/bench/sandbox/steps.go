package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/test/bench/contender"
)

// noteSteps notes the steps of a pod that has been run, as its timeline has
// them: when each began after the first one, and how long it took.
func (m *measurement) noteSteps(ctx context.Context, kind, id string) error {
	response := contender.Must(m.node.Client.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true}))
	var info struct {
		Timeline []struct {
			step.Row
			Took string `json:"took"`
		}
	}
	contender.Check(json.Unmarshal([]byte(response.GetInfo()["info"]), &info))
	if len(info.Timeline) == 0 {
		return fmt.Errorf("pod %s has no timeline", id)
	}
	for _, row := range info.Timeline {
		name := kind + row.Step
		if row.Kind == "plugin" {
			name = kind + "  " + row.Step
		}
		took, _ := time.ParseDuration(row.Took) // none for one that took none
		m.took[name] = append(m.took[name], took)
		m.began[name] = append(m.began[name], row.Start.Sub(info.Timeline[0].Start))
	}
	return nil
}

// reportSteps prints where the time of a Run goes, in the order of the
// beginnings.
func (m *measurement) reportSteps() {
	fmt.Printf("\nwhere the time of a Run goes: its steps, with the plugins below theirs; p50\n\n%-32s %9s %9s\n", "", "begins", "takes")
	for _, host := range []bool{false, true} {
		var names []string
		for name := range m.began {
			if strings.HasPrefix(name, hostNetwork) == host {
				names = append(names, name)
			}
		}
		slices.SortFunc(names, func(a, b string) int {
			return int(contender.Quantile(m.began[a], 0.5) - contender.Quantile(m.began[b], 0.5))
		})
		for _, name := range names {
			fmt.Printf("%-32s %9.3f %9.3f\n", name, contender.Milliseconds(contender.Quantile(m.began[name], 0.5)), m.p50(name))
		}
	}
}
