// Command takeover measures what a node's pods notice when their supervisor dies:
// pods of several sleeping processes each, the supervisor killed again and again.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
	"github.com/minicri/minicri/test/bench/contender"
)

func main() {
	b := &takeover{}
	flag.IntVar(&b.pods, "pods", 100, "pods")
	flag.IntVar(&b.containers, "containers", 4, "containers of each, besides its pause")
	flag.IntVar(&b.times, "times", 9, "deaths")
	flag.Parse()
	contender.Main("takeover", b.run)
}

type takeover struct {
	pods, containers, times int
	dir                     string // of the supervisor
}

// mostDeath is the goal, on a machine that does nothing else.
const mostDeath = time.Second

func (b *takeover) run(ctx context.Context, nodes [2]*contender.Node) error {
	n := nodes[0]
	b.dir = n.SupervisorDir()
	began := time.Now()
	err := contender.Parallel(b.pods, func(i int) error {
		pod, err := n.RunPodIn(ctx, fmt.Sprint("held", i), runtimeapi.NamespaceMode_NODE)
		for k := 0; k < b.containers && err == nil; k++ {
			_, err = pod.Run(ctx, fmt.Sprint("app", k), contender.App)
		}
		return err
	})
	if err != nil {
		return err
	}
	fmt.Printf("%d pods of %d containers made in %v\n", b.pods, b.containers, time.Since(began).Round(time.Second))
	var deaths, listens []time.Duration
	for range b.times {
		listened, served, err := b.kill(ctx)
		if err != nil {
			return err
		}
		listens, deaths = append(listens, listened), append(deaths, served)
	}
	fmt.Println()
	tell("after a kill another process has the sockets after", listens, 0)
	tell("after a kill a successor serves after", deaths, mostDeath)
	return nil
}

func tell(what string, took []time.Duration, most time.Duration) {
	slices.Sort(took)
	fmt.Printf("%s: median %.0f, p90 %.0f, longest %.0f ms", what, contender.Milliseconds(contender.Quantile(took, 0.5)),
		contender.Milliseconds(contender.Quantile(took, 0.9)), contender.Milliseconds(took[len(took)-1]))
	if most > 0 {
		fmt.Printf(", to reach <= %.0f", contender.Milliseconds(most))
	}
	fmt.Println()
}

// serving returns when a supervisor other than that of a pid lists all containers; and when
// one was there to connect to.
func (b *takeover) serving(ctx context.Context, but int) (connected time.Time, err error) {
	for ; ctx.Err() == nil; time.Sleep(time.Millisecond) {
		pid, err := b.supervisor()
		if err != nil || pid == but {
			continue
		}
		c, err := client.Connect(ctx, b.dir)
		if err != nil {
			continue
		}
		connected := time.Now()
		all, err := c.List(ctx)
		_ = c.Close()
		if err != nil {
			continue
		}
		if len(all) < b.pods*(b.containers+1) {
			return connected, fmt.Errorf("a successor lists %d containers and pauses", len(all))
		}
		for _, one := range all {
			if one.GetStatus() != api.Status_STATUS_RUNNING {
				return connected, fmt.Errorf("container %s: %v", one.GetId(), one.GetStatus())
			}
		}
		return connected, nil
	}
	return time.Time{}, ctx.Err()
}

// supervisor is the process that listens (SO_PEERCRED of unix(7)).
func (b *takeover) supervisor() (pid int, err error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: filepath.Join(b.dir, api.ControlSocket)})
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var credentials *unix.Ucred
	var asked error
	err = raw.Control(func(fd uintptr) {
		credentials, asked = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(err, asked); err != nil {
		return 0, err
	}
	return int(credentials.Pid), nil
}

func (b *takeover) kill(ctx context.Context) (listened, served time.Duration, err error) {
	time.Sleep(settle)
	pid, err := b.supervisor()
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		return 0, 0, err
	}
	connected, err := b.serving(ctx, pid)
	return connected.Sub(began), time.Since(began), err
}

// settle is how long daemon and supervisor have to be done with the time before.
const settle = 3 * time.Second
