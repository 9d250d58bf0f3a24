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
	c.add(contender.Row{What: fmt.Sprintf("log of lines of %d bytes, MiB/s", contender.LineSize), AtLeast: 1.5}.Rates(took, logMiB))
	c.add(contender.Row{What: "CPU of daemon and shim, ms/MiB", AtMost: 1}.Costs(used, logMiB))
	return err
}

func writeLog(ctx context.Context, n *contender.Node, name string) (wall, cpu time.Duration, err error) {
	pod, err := n.RunPod(ctx, name)
	if err != nil {
		return 0, 0, err
	}
	script := fmt.Sprintf("i=0; while [ $i -lt %d ]; do cat %s; i=$((i+1)); done; echo %s; exec %s",
		logMiB<<20/contender.LinesSize, contender.Lines, lastLine, contender.App)
	id, err := pod.Create(ctx, "log", "/bin/sh", "-c", script)
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
	if err := checkLog(pod.LogPath("log")); err != nil {
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
func checkLog(path string) error {
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
	if want := logMiB<<20/contender.LineSize + 1; lines != want {
		return fmt.Errorf("%d of %d lines are in the log", lines, want)
	}
	return log.Truncate(0)
}
