package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
)

// readyTime is how long a cluster may take to become ready on a slow machine.
const readyTime = 5 * time.Minute

// list is what is used of the API's lists of nodes and pods.
type list struct {
	Items []struct {
		Metadata struct {
			Name      string `json:"name"`
			Namespace string `json:"namespace"`
		} `json:"metadata"`
		Spec struct {
			PodCIDR string `json:"podCIDR"`
		} `json:"spec"`
		Status struct {
			Conditions []condition `json:"conditions"`
			NodeInfo   struct {
				ContainerRuntimeVersion string `json:"containerRuntimeVersion"`
			} `json:"nodeInfo"`
		} `json:"status"`
	} `json:"items"`
}

type condition struct {
	Type   string `json:"type"`
	Status string `json:"status"`
}

func isReady(conditions []condition) bool {
	return slices.Contains(conditions, condition{"Ready", "True"})
}

func (c *cluster) get(ctx context.Context, arguments ...string) (list, error) {
	var l list
	out, err := output(c.kubectl(ctx, append([]string{"get", "-o", "json"}, arguments...)...))
	if err != nil {
		return l, err
	}
	return l, json.Unmarshal([]byte(out), &l)
}

// awaitReady waits until every node is Ready and its pods are routed, then until
// the pods of the system are Ready.
func (c *cluster) awaitReady(ctx context.Context) error {
	runtime := ""
	err := c.until(ctx, func() (string, error) {
		nodes, err := c.get(ctx, "nodes")
		if err != nil {
			return "", err
		}
		var missing []string
		for _, n := range c.Nodes {
			missing = append(missing, n.Name)
			for _, item := range nodes.Items {
				if item.Metadata.Name == n.Name && isReady(item.Status.Conditions) && item.Spec.PodCIDR != "" {
					n.PodCIDR, runtime = item.Spec.PodCIDR, item.Status.NodeInfo.ContainerRuntimeVersion
					missing = missing[:len(missing)-1]
				}
			}
		}
		return strings.Join(missing, ", "), nil
	})
	if err != nil {
		return fmt.Errorf("nodes that are not ready: %w", err)
	}
	if err := c.routePods(); err != nil {
		return err
	}
	if err := c.save(); err != nil {
		return err
	}
	c.progress.did("%d nodes are Ready, with %s", len(c.Nodes), runtime)
	if err := c.awaitSystem(ctx); err != nil {
		return err
	}
	c.progress.did("the pods of kube-system are Ready")
	return nil
}

func (c *cluster) awaitSystem(ctx context.Context) error {
	err := c.until(ctx, func() (string, error) {
		pods, err := c.get(ctx, "pods", "-n", "kube-system")
		if err != nil {
			return "", err
		}
		var missing []string
		for _, pod := range pods.Items {
			if !isReady(pod.Status.Conditions) {
				missing = append(missing, pod.Metadata.Name)
			}
		}
		return strings.Join(missing, ", "), nil
	})
	if err != nil {
		return fmt.Errorf("pods of kube-system that are not ready: %w", err)
	}
	return nil
}

// until waits until nothing is missing.
func (c *cluster) until(ctx context.Context, missing func() (string, error)) error {
	ctx, cancel := context.WithTimeout(ctx, readyTime)
	defer cancel()
	for {
		names, err := missing()
		if err == nil && names == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w (%v)", names, ctx.Err(), err)
		case <-time.After(500 * time.Millisecond):
		}
	}
}
