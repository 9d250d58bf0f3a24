package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	cost "github.com/minicri/minicri/test/bench/contender"
)

// What is measured, in the order of the table.
const (
	rowSingle  = "one pod, apply to Ready, p50 of 15, ms"
	rowTwenty  = "20 pods together, all Ready, s"
	rowSixty   = "60 pods together, all Ready, s"
	rowIdle    = "CPU of the runtime in an idle minute with 60 pods, s"
	rowMemory  = "memory of the runtime with 60 pods, MiB"
	rowJob     = "Job of 200 short pods, 40 at a time, s"
	rowJobMem  = "memory after the Job, its pods not deleted, MiB"
	rowJobFD   = "descriptors after the Job"
	rowBefore  = "memory before the Job, MiB"
	rowFDFirst = "descriptors before the Job"
)

var rows = []string{rowSingle, rowTwenty, rowSixty, rowIdle, rowMemory, rowBefore, rowFDFirst, rowJob, rowJobMem, rowJobFD}

const (
	namespace  = "bench"
	image      = "cluster.minicri.test/tools:minicri"
	singles    = 15
	idleMinute = time.Minute
	jobPods    = 200
)

type bench struct {
	api       *api
	processes func() (usage, error)
	results   map[string]float64
}

type object = map[string]any

func pod(name string) object {
	return object{
		"apiVersion": "v1", "kind": "Pod", "metadata": object{"name": name},
		"spec": object{
			"terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false, "enableServiceLinks": false,
			"containers": []object{{"name": "main", "image": image, "command": []string{"sleep", "100000"}, "resources": object{"requests": object{"cpu": "1m"}}}},
		},
	}
}

// start makes pods, and returns when the last is Ready, with the time of each from
// its POST.
func (b *bench) start(ctx context.Context, prefix string, n int) ([]time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	watch := cost.Must(b.api.watchPods(ctx))
	defer watch.close()
	begun := make(map[string]time.Time)
	for i := range n {
		name := fmt.Sprintf("%s-%d", prefix, i)
		begun[name] = time.Now()
		cost.Check(b.api.post(ctx, "/api/v1/namespaces/"+namespace+"/pods", pod(name)))
	}
	var took []time.Duration
	for len(begun) > 0 {
		p := cost.Must(watch.next())
		if since, waited := begun[p.Metadata.Name]; waited && p.ready() {
			took = append(took, time.Since(since))
			delete(begun, p.Metadata.Name)
		}
	}
	return took, nil
}

func (b *bench) single(ctx context.Context) error {
	var took []time.Duration
	for i := range singles {
		one := cost.Must(b.start(ctx, fmt.Sprintf("single-%d", i), 1))
		took = append(took, one...)
	}
	slices.Sort(took)
	b.results[rowSingle] = float64(took[len(took)/2].Microseconds()) / 1000
	return b.api.deletePods(ctx)
}

// together measures n pods that are made at once. The last 60 stay for idle.
func (b *bench) together(n int, row string) func(context.Context) error {
	return func(ctx context.Context) error {
		begun := time.Now()
		cost.Must(b.start(ctx, "many", n))
		b.results[row] = time.Since(begun).Seconds()
		if row == rowSixty {
			return nil
		}
		return b.api.deletePods(ctx)
	}
}

func (b *bench) idle(ctx context.Context) error {
	time.Sleep(10 * time.Second) // the starts have to end first
	before := cost.Must(b.processes())
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(idleMinute):
	}
	after := cost.Must(b.processes())
	b.results[rowIdle] = (after.cpu - before.cpu).Seconds()
	b.results[rowMemory] = after.mebibytes
	return b.api.deletePods(ctx)
}

func (b *bench) job(ctx context.Context) error {
	time.Sleep(5 * time.Second)
	before := cost.Must(b.processes())
	b.results[rowBefore], b.results[rowFDFirst] = before.mebibytes, float64(before.descriptors)
	begun := time.Now()
	job := object{
		"apiVersion": "batch/v1", "kind": "Job", "metadata": object{"name": "short"},
		"spec": object{"completions": jobPods, "parallelism": 40, "template": object{"spec": object{
			"restartPolicy": "Never", "automountServiceAccountToken": false,
			"containers": []object{{"name": "main", "image": image, "command": []string{"true"}, "resources": object{"requests": object{"cpu": "1m"}}}},
		}}},
	}
	cost.Check(b.api.post(ctx, "/apis/batch/v1/namespaces/"+namespace+"/jobs", job))
	cost.Check(b.api.awaitJob(ctx, "short"))
	b.results[rowJob] = time.Since(begun).Seconds()
	time.Sleep(10 * time.Second)
	after := cost.Must(b.processes())
	b.results[rowJobMem], b.results[rowJobFD] = after.mebibytes, float64(after.descriptors)
	return nil
}
