package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/minicri/minicri/test/bench/contender"
)

const (
	// logMiB is how much a container writes.
	logMiB = 256
	// lastLine is what it writes then.
	lastLine = "that was all"
)

// logs times how fast, and at what cost, the output of one container gets to
// its log.
func (c *comparison) logs(ctx context.Context) error {
	var took, used [2][]time.Duration
	err := contender.Alternate(c.logRounds, func(round, i int) error {
		wall, cpu, err := writeLog(ctx, c.nodes[i], fmt.Sprintf("log%d", round))
		took[i], used[i] = append(took[i], wall), append(used[i], cpu)
		return err
	})
	c.add(contender.Row{What: fmt.Sprintf("log of lines of %d bytes, MiB/s", contender.LineSize), AtLeast: 11.5}.Rates(took, logMiB))
	c.add(contender.Row{What: "CPU of daemon and shim, ms/MiB", AtMost: 1}.Costs(used, logMiB))
	if err != nil {
		return err
	}
	return c.manyLogs(ctx)
}

const (
	// writers write their logs at once, manyMiB together.
	writers, manyMiB = 20, 320
	// manyRounds are timed.
	manyRounds = 3
)

// manyLogs times the output of many containers at once.
func (c *comparison) manyLogs(ctx context.Context) error {
	var took [2][]time.Duration
	err := contender.Alternate(manyRounds, func(round, i int) error {
		wall, err := writeLogs(ctx, c.nodes[i], fmt.Sprintf("logs%d", round))
		took[i] = append(took[i], wall)
		return err
	})
	c.add(contender.Row{What: fmt.Sprintf("logs of %d containers at once, MiB/s", writers), AtLeast: 3}.Rates(took, manyMiB))
	return err
}

// writeLogs returns how long containers of one pod take that start to write
// together.
func writeLogs(ctx context.Context, n *contender.Node, name string) (time.Duration, error) {
	pod, err := n.RunPod(ctx, name)
	if err != nil {
		return 0, err
	}
	var ids [writers]string
	err = contender.Parallel(writers, func(k int) (err error) {
		ids[k], err = pod.Create(ctx, fmt.Sprintf("log%d", k), "/bin/sh", "-c", logScript(manyMiB/writers))
		return err
	})
	if err != nil {
		return 0, err
	}
	began := time.Now()
	err = contender.Burst(writers, writers, func(k int) error {
		if err := n.StartContainer(ctx, ids[k]); err != nil {
			return err
		}
		return awaitLastLine(ctx, pod.LogPath(fmt.Sprintf("log%d", k)))
	})
	wall := time.Since(began)
	for k := range writers {
		if err == nil {
			err = checkLog(pod.LogPath(fmt.Sprintf("log%d", k)), manyMiB/writers)
		}
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", n.Name, err)
	}
	return wall, n.RemovePod(ctx, pod.ID)
}

// logScript writes so many MiB, the last line, and sleeps.
func logScript(mib int) string {
	return fmt.Sprintf("i=0; while [ $i -lt %d ]; do cat %s; i=$((i+1)); done; echo %s; exec %s", mib<<20/contender.LinesSize, contender.Lines, lastLine, contender.App)
}

func writeLog(ctx context.Context, n *contender.Node, name string) (wall, cpu time.Duration, err error) {
	pod, err := n.RunPod(ctx, name)
	if err != nil {
		return 0, 0, err
	}
	id, err := pod.Create(ctx, "log", "/bin/sh", "-c", logScript(logMiB))
	if err != nil {
		return 0, 0, err
	}
	before, err := n.CPU()
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := n.StartContainer(ctx, id); err != nil {
		return 0, 0, err
	}
	if err := awaitLastLine(ctx, pod.LogPath("log")); err != nil {
		return 0, 0, fmt.Errorf("%s: %w", n.Name, err)
	}
	wall = time.Since(began)
	after, err := n.CPU()
	if err != nil {
		return 0, 0, err
	}
	if err := checkLog(pod.LogPath("log"), logMiB); err != nil {
		return 0, 0, fmt.Errorf("%s: %w", n.Name, err)
	}
	return wall, after - before, n.RemovePod(ctx, pod.ID)
}

// awaitLastLine looks at the end of a log until the last line is there.
func awaitLastLine(ctx context.Context, path string) error {
	log, err := os.Open(path)
	if err != nil {
		return err
	}
	defer log.Close()
	end := make([]byte, len(lastLine)+1)
	for ; ; time.Sleep(time.Millisecond) {
		info, err := log.Stat()
		if err != nil {
			return err
		}
		_, err = log.ReadAt(end, max(0, info.Size()-int64(len(end))))
		if err == nil && string(end) == lastLine+"\n" {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("the log does not end: %w", ctx.Err())
		}
	}
}

// checkLog counts lines, and frees the memory that they take.
func checkLog(path string, mib int) error {
	log, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer log.Close()
	lines, buffer := 0, make([]byte, 1<<20)
	for {
		n, err := log.Read(buffer)
		lines += bytes.Count(buffer[:n], []byte{'\n'})
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
	}
	if want := mib<<20/contender.LineSize + 1; lines != want {
		return fmt.Errorf("%d of %d lines are in the log", lines, want)
	}
	return log.Truncate(0)
}
