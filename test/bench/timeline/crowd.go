package main

import (
	"context"
	"errors"
	"sync"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// crowd is many pods, which are run and removed a few at a time.
type crowd struct {
	client runtimeapi.RuntimeServiceClient

	mu  sync.Mutex // guards ids
	ids []string
}

// concurrency is how many calls are made at a time.
const concurrency = 8

// forEach calls do for 0 to count-1, concurrently, and returns all errors.
func forEach(count int, do func(i int) error) error {
	next, errs := make(chan int), make(chan error, count)
	var workers sync.WaitGroup
	for range concurrency {
		workers.Go(func() {
			for i := range next {
				errs <- do(i)
			}
		})
	}
	for i := range count {
		next <- i
	}
	close(next)
	workers.Wait()
	close(errs)
	var all []error
	for err := range errs {
		all = append(all, err)
	}
	return errors.Join(all...)
}

// run runs the pods.
func (c *crowd) run(ctx context.Context, count int, config func(i int) *runtimeapi.PodSandboxConfig) error {
	return forEach(count, func(i int) error {
		pod, err := c.client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config(i)})
		if err == nil {
			c.mu.Lock()
			c.ids = append(c.ids, pod.GetPodSandboxId())
			c.mu.Unlock()
		}
		return err
	})
}

// remove removes the pods, also when the benchmark was interrupted.
func (c *crowd) remove() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	return forEach(len(c.ids), func(i int) error {
		_, err := c.client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: c.ids[i]})
		return err
	})
}
