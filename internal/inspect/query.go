package inspect

import (
	"slices"
	"strings"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/timeline"
)

// source is where pods and containers are read: a daemon, or its files.
type source interface {
	// pods are those that are there and match, with their containers.
	pods(match func(timeline.Pod) bool) ([]timeline.Pod, error)
}

// query finds the pods that are asked for: an id or its beginning, a name,
// NAMESPACE/NAME, the same of a container, or "" for all; those that are there,
// and those that are gone or have failed.
func query(from source, lives *step.Lives, wanted string) ([]timeline.Pod, error) {
	pods, err := from.pods(func(p timeline.Pod) bool { return p.Matches(wanted) })
	if err != nil {
		return nil, err
	}
	past, err := pastOf(lives, pods, wanted)
	if err != nil {
		return nil, err
	}
	all := join(pods, past)
	if len(all) == 0 && wanted != "" {
		// A container's own name, of a pod that is gone: no index knows it.
		if past, err = lives.List(); err != nil {
			return nil, err
		}
		all = join(nil, past)
	}
	all = slices.DeleteFunc(all, func(p timeline.Pod) bool { return !p.Matches(wanted) })
	for i := range all {
		all[i].Finish()
	}
	timeline.Newest(all)
	return all, nil
}

// pastOf reads as few of the lives as it can.
func pastOf(lives *step.Lives, pods []timeline.Pod, wanted string) ([]step.Life, error) {
	if wanted == "" {
		return lives.List()
	}
	names := []string{wanted}
	if parts := strings.Split(wanted, "/"); len(parts) > 1 {
		names[0] = parts[1]
	}
	past, err := lives.Get(wanted)
	if err != nil {
		return nil, err
	}
	for _, life := range past {
		names = append(names, life.PodName())
	}
	for _, p := range pods {
		_, name, _ := strings.Cut(p.Name, "/")
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		of, err := lives.OfPod(name)
		if err != nil {
			return nil, err
		}
		past = append(past, of...)
	}
	return past, nil
}

// join adds the lives to the pods: containers to theirs, the others by themselves.
func join(pods []timeline.Pod, past []step.Life) []timeline.Pod {
	index := make(map[string]int)
	for i, p := range pods {
		index[p.ID] = i
	}
	for _, life := range past {
		if _, there := index[life.ID]; life.Kind == "container" || there {
			continue
		}
		index[life.ID] = len(pods)
		pods = append(pods, podOf(life))
	}
	done := make(map[string]bool)
	for _, life := range past {
		if life.Kind != "container" || done[life.ID] {
			continue
		}
		done[life.ID] = true
		i, there := index[life.Pod]
		if !there {
			i, index[life.Pod] = len(pods), len(pods)
			pod := podOf(life)
			pod.Kind, pod.ID, pod.Rows, pod.Error, pod.Attempt = "pod", life.Pod, nil, "", 0
			pod.Name, pod.State = strings.TrimSuffix(life.Name, "/"+containerName(life)), timeline.Removed
			pods = append(pods, pod)
		}
		if !slices.ContainsFunc(pods[i].Containers, func(c timeline.Container) bool { return c.ID == life.ID }) {
			pods[i].Containers = append(pods[i].Containers, containerOf(life))
		}
	}
	return pods
}

func podOf(life step.Life) timeline.Pod {
	p := timeline.Pod{Kind: life.Kind, ID: life.ID, Name: life.Name, Attempt: life.Attempt, State: timeline.Removed, Error: life.Error, Rows: life.Rows}
	if life.Error != "" {
		p.State = timeline.Failed
	}
	if len(life.Network) > 0 {
		p.Network = &timeline.Network{Name: networkName(life.Network), Config: life.Network}
	}
	return p
}

func containerOf(life step.Life) timeline.Container {
	c := timeline.Container{ID: life.ID, Name: containerName(life), Attempt: life.Attempt, State: timeline.Removed, Error: life.Error, Rows: life.Rows}
	if life.Error != "" {
		c.State = timeline.Failed
	}
	return c
}

func containerName(life step.Life) string { return life.Name[strings.LastIndexByte(life.Name, '/')+1:] }
