// Command takeover measures what a node's pods notice when their supervisor dies or
// becomes another build: pods of several sleeping processes each, the supervisor
// killed, and upgraded, again and again.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/client"
	"github.com/minicri/minicri/test/bench/contender"
)

func main() {
	b := &takeover{}
	flag.IntVar(&b.pods, "pods", 100, "pods")
	flag.IntVar(&b.containers, "containers", 4, "containers of each, besides its pause")
	flag.IntVar(&b.times, "times", 9, "deaths, and upgrades")
	flag.Parse()
	contender.Main("takeover", b.run)
}

type takeover struct {
	pods, containers, times int
	dir                     string // of the supervisor
}

// goals, on a machine that does nothing else.
const (
	mostDeath   = time.Second
	mostUpgrade = 100 * time.Millisecond
)

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
	var deaths, listens, pauses, upgrades []time.Duration
	for range b.times {
		listened, served, err := b.kill(ctx)
		if err != nil {
			return err
		}
		listens, deaths = append(listens, listened), append(deaths, served)
	}
	for i := range b.times {
		paused, took, err := b.upgrade(ctx, byte(i))
		if err != nil {
			return err
		}
		pauses, upgrades = append(pauses, paused), append(upgrades, took)
	}
	fmt.Println()
	tell("after a kill another process has the sockets after", listens, 0)
	tell("after a kill a successor serves after", deaths, mostDeath)
	tell("an upgrade holds output up for", pauses, mostUpgrade)
	tell("an upgrade takes, all in all", upgrades, 0)
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

// upgrade makes the supervisor the same program with one more byte.
func (b *takeover) upgrade(ctx context.Context, mark byte) (paused, took time.Duration, err error) {
	time.Sleep(settle)
	content, err := os.ReadFile(filepath.Join(filepath.Dir(contender.BesideUs().Minicri), "minicri-shim"))
	if err != nil {
		return 0, 0, err
	}
	path := filepath.Join(b.dir, "next")
	defer os.Remove(path)
	if err := os.WriteFile(path, append(content, mark), 0o700); err != nil {
		return 0, 0, err
	}
	program, err := client.OpenProgram(path)
	if err != nil {
		return 0, 0, err
	}
	defer program.Close()
	began := time.Now()
	info, err := client.Upgrade(ctx, b.dir, program.ForOthers(), program.Build())
	if err != nil {
		return 0, 0, err
	}
	took = time.Since(began)
	_, err = b.serving(ctx, 0)
	return time.Duration(info.GetPaused()), took, err
}
