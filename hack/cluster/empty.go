package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	removeTime = 2 * time.Minute
	// removals is how many pods are removed side by side.
	removals = 8
)

// emptyAndLook stops the kubelet, removes the node's pods by its runtime, and
// looks for what they left. A node that is down already has nothing to look at.
func (n *node) emptyAndLook(ctx context.Context) error {
	if pid, err := n.pid(n.cluster.Runtime); err != nil || pid == 0 {
		n.cluster.progress.did("%s: %s does not run, so its pods are not removed and not looked for", n.Name, n.cluster.Runtime)
		return nil
	}
	if err := n.stopService(ctx, "kubelet"); err != nil {
		return fmt.Errorf("stop the kubelet of %s: %w", n.Name, err)
	}
	count, err := n.removePods(ctx)
	if err != nil {
		return fmt.Errorf("remove the pods of %s: %w", n.Name, err)
	}
	n.cluster.progress.did("%s: %d pods removed", n.Name, count)
	found, err := n.run(ctx, "cluster", lookRole)
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", n.Name, err, found)
	}
	n.cluster.progress.did("%s: no leak", n.Name)
	return nil
}

// removePods stops and removes every sandbox.
func (n *node) removePods(ctx context.Context) (int, error) {
	client, closeClient, err := n.runtime()
	if err != nil {
		return 0, err
	}
	defer closeClient()
	ctx, cancel := context.WithTimeout(ctx, removeTime)
	defer cancel()
	pods, err := client.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return 0, err
	}
	removing, ctx := errgroup.WithContext(ctx)
	removing.SetLimit(removals)
	for _, pod := range pods.GetItems() {
		removing.Go(func() error {
			_, stopped := client.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: pod.GetId()})
			_, removed := client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: pod.GetId()})
			return errors.Join(stopped, removed)
		})
	}
	return len(pods.GetItems()), removing.Wait()
}
