package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/bench/contender"
)

// result is one pull.
type result struct {
	wall time.Duration
	cost
}

// cost is what a process has used since it started.
type cost struct {
	cpu  time.Duration // user and system, with children that it waited for
	peak int64         // bytes of resident memory
}

func costOf(process *contender.Process) (cost, error) {
	cpu := contender.Must(contender.CPUWithChildren(process.PID))
	peak, err := contender.PeakMemory(process.PID)
	return cost{cpu: cpu, peak: peak}, err
}

func contenders(minicri string) []contender.Runtime {
	programs := programsWith(minicri)
	return []contender.Runtime{contender.OfMinicri(programs, ""), contender.OfContainerd(programs, "")}
}

// pullInTurn lets each contender pull once per round.
func pullInTurn(ctx context.Context, dir, reference string, o options) (map[string][]result, error) {
	results := map[string][]result{}
	for round := range o.rounds {
		for i, c := range contenders(o.minicri) {
			at := filepath.Join(dir, fmt.Sprintf("%c%d", 'a'+i, round)) // short: sockets are below it
			one, err := pullOnce(ctx, c, at, reference)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", c.Name, err)
			}
			results[c.Name] = append(results[c.Name], one)
		}
	}
	return results, nil
}

// pullOnce measures a pull by a process just started, on a filesystem just made:
// on a used one, ext4 looks at every inode that was freed within the last
// minute before it gives one out, which would be most of what is measured.
func pullOnce(ctx context.Context, c contender.Runtime, dir, reference string) (_ result, err error) {
	remove := contender.Must(makeDisk(ctx, dir))
	defer func() { err = errors.Join(err, remove()) }()
	process := contender.Must(c.Start(ctx, dir))
	defer process.Stop()
	connection, err := contender.Connect(ctx, dir)
	if err != nil {
		return result{}, fmt.Errorf("%w: %s", err, process.Output)
	}
	defer connection.Close()
	before := contender.Must(costOf(process))
	syscall.Sync()
	began := time.Now()
	request := &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: reference}}
	contender.Must(runtimeapi.NewImageServiceClient(connection).PullImage(ctx, request))
	wall := time.Since(began)
	after, err := costOf(process)
	return result{wall: wall, cost: cost{cpu: after.cpu - before.cpu, peak: after.peak}}, err
}

// diskSize is that of the file that holds the filesystem; it is sparse.
const diskSize = 2 << 30

// makeDisk mounts a new filesystem at dir.
func makeDisk(ctx context.Context, dir string) (remove func() error, err error) {
	disk := dir + ".disk"
	contender.Check(os.WriteFile(disk, nil, 0o600))
	contender.Check(os.Truncate(disk, diskSize))
	contender.Check(os.Mkdir(dir, 0o700))
	for _, command := range [][]string{{"mkfs.ext4", "-q", disk}, {"mount", "-o", "loop", disk, dir}} {
		if out, err := exec.CommandContext(ctx, command[0], command[1:]...).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%v: %w: %s", command, err, out)
		}
	}
	return func() error { return errors.Join(unix.Unmount(dir, unix.MNT_DETACH), os.Remove(disk)) }, nil
}

// printPulls prints medians and their ratios to containerd's.
func printPulls(results map[string][]result) {
	base := medianOf(results[contender.Containerd])
	table := tabwriter.NewWriter(os.Stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "PullImage, median\twall s\tratio\tCPU s\tratio\tpeak MiB\tratio")
	for _, name := range []string{contender.Minicri, contender.Containerd} {
		m := medianOf(results[name])
		fmt.Fprintf(table, "%s\t%.2f\t%.2f\t%.2f\t%.2f\t%.1f\t%.2f\n", name,
			m.wall.Seconds(), m.wall.Seconds()/base.wall.Seconds(), m.cpu.Seconds(), m.cpu.Seconds()/base.cpu.Seconds(),
			float64(m.peak)/(1<<20), float64(m.peak)/float64(base.peak))
	}
	fmt.Fprintln(table, "to reach\t\t0.70\t\t0.70\t\t0.50")
	_ = table.Flush()
}

func medianOf(all []result) result {
	return result{
		wall: median(all, func(r result) time.Duration { return r.wall }),
		cost: cost{
			cpu:  median(all, func(r result) time.Duration { return r.cpu }),
			peak: median(all, func(r result) int64 { return r.peak }),
		},
	}
}

func median[T any, N int64 | time.Duration](all []T, of func(T) N) N {
	values := make([]N, len(all))
	for i, one := range all {
		values[i] = of(one)
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// programsWith are those of make, with that daemon.
func programsWith(minicri string) contender.Programs {
	programs := contender.BesideUs()
	programs.Minicri = minicri
	return programs
}
