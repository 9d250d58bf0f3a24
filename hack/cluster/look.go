package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/minicri/minicri/test/leak"
)

const settleTime = 20 * time.Second

// nodeScope is where a node is searched for what pods left.
var nodeScope = leak.Scope{
	NetnsDirs:   []string{"/run/netns"},
	Mounts:      []string{"/run", "/var/lib/minicri", "/var/lib/kubelet"},
	Links:       true,
	Rules:       true,
	AddressDirs: []string{"/var/lib/cni/networks/minicri"},
	ResultDirs:  []string{"/var/lib/cni/results"},
	Cgroups:     []string{"/kubepods", "/minicri"},
	Executables: []string{"pause", "containerd-shim-runc-v2", "runc:[2:INIT]"},
}

// kept is what is not a pod's, or not the runtime's: what a node has, what the
// runtime keeps while it lives, and what the kubelet, which has been stopped, makes
// for a pod and removes itself.
var kept = regexp.MustCompile(`^(` + strings.Join([]string{
	`link (lo|eth0|minicri0)( .*)?`,
	`mount /run(/proc|/netns|/minicri.*|/lock|/containerd)?`,
	`mount /var/lib/kubelet/pods/[^/]*/volumes/.*`,
	`cgroup /minicri(/minicri-cni-[0-9a-f]+-pool-[0-9]+)?`, // runs of plugins use these in turn
	`cgroup /kubepods(/burstable|/besteffort)?(/pod[0-9a-f-]+)?`,
}, "|") + `)$`)

// lookForLeaks prints what is left on the node when all its pods are gone. It is
// run inside the node.
func lookForLeaks(ctx context.Context, output io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	for {
		found, err := leak.Take(context.WithoutCancel(ctx), nodeScope)
		if err != nil {
			return err
		}
		leaks := slices.DeleteFunc(leak.Diff(leak.Snapshot{}, found), isKept)
		if len(leaks) == 0 {
			_, err := fmt.Fprintln(output, "nothing is left")
			return err
		}
		select {
		case <-time.After(100 * time.Millisecond):
			continue
		case <-ctx.Done():
		}
		for _, l := range leaks {
			fmt.Fprintln(output, l)
		}
		return errors.New("something is left of pods")
	}
}

func isKept(l leak.Leak) bool { return kept.MatchString(string(l.Kind) + " " + l.Name) }
