package image

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/pkg/archive/compression"
	"github.com/containerd/errdefs"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/semaphore"
)

const (
	// maxWindow is the largest window of a zstd frame, which its decoder has to hold:
	// the default of the zstd program.
	maxWindow = 128 << 20
	// maxZstd is how many decoders run at once for all of the node.
	maxZstd = 2
	// zstdName is what the program is called (argv[0]) where it decodes a layer.
	zstdName = "minicri-unzstd"
)

// decompress returns the plain bytes of a layer or an archive, whose form it tells by
// the first bytes. Close ends it before its end. A zstd decoder takes one of the
// places, if they are limited.
func decompress(ctx context.Context, packed io.Reader, places *semaphore.Weighted) (io.ReadCloser, error) {
	buffered := bufio.NewReaderSize(packed, 32<<10)
	magic, err := buffered.Peek(10)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch compression.DetectCompression(magic) {
	case compression.Gzip:
		return gzip.NewReader(buffered)
	case compression.Zstd:
		if places == nil {
			places = semaphore.NewWeighted(1)
		}
		if err := places.Acquire(ctx, 1); err != nil {
			return nil, err
		}
		return startZstd(ctx, buffered, func() { places.Release(1) })
	default:
		return io.NopCloser(buffered), nil
	}
}

// zstdDecoder is a process that decodes one stream. A decoder has to hold as much as
// the author of the stream likes, up to maxWindow. In the daemon that would be memory
// which the kernel takes from pods; this process is the first that the kernel ends.
type zstdDecoder struct {
	command *exec.Cmd
	cancel  context.CancelFunc
	plain   io.ReadCloser
	stderr  bytes.Buffer
	end     func() error // waits for the process and returns why it failed
}

// startZstd starts the decoder. ended is called when it has ended, or has not begun.
func startZstd(ctx context.Context, packed io.Reader, ended func()) (io.ReadCloser, error) {
	running, cancel := context.WithCancel(ctx)
	d := &zstdDecoder{command: exec.CommandContext(running, "/proc/self/exe"), cancel: cancel}
	d.command.Args, d.command.Env = []string{zstdName}, []string{"GOMAXPROCS=1"}
	d.command.Stdin, d.command.Stderr = packed, &d.stderr
	plain, err := d.command.StdoutPipe()
	if err == nil {
		err = d.command.Start()
	}
	if err != nil {
		cancel()
		ended()
		return nil, fmt.Errorf("start the zstd decoder: %w", err)
	}
	d.plain = plain
	d.end = sync.OnceValue(func() error {
		defer ended()
		defer cancel()
		return d.failure(ctx, d.command.Wait())
	})
	return d, nil
}

// failure says why the process has failed, if it has.
func (d *zstdDecoder) failure(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case d.command.ProcessState.ExitCode() < 0:
		return fmt.Errorf("the zstd decoder was ended (%w), by the kernel if memory ran out: %w", err, errdefs.ErrResourceExhausted)
	}
	return fmt.Errorf("zstd: %s", cut(strings.TrimSpace(d.stderr.String()), maxWords))
}

func (d *zstdDecoder) Read(p []byte) (int, error) {
	n, err := d.plain.Read(p)
	if err != nil && n == 0 {
		if failed := d.end(); failed != nil {
			return 0, failed
		}
	}
	return n, err
}

// Close ends the process if it has not come to its end.
func (d *zstdDecoder) Close() error {
	d.cancel()
	_ = d.end() // its error was read, or nobody reads on
	return nil
}

// IsZstdDecoder reports whether this process was started to decode a layer: then
// it is to return DecodeZstd, and do nothing else.
func IsZstdDecoder() bool { return os.Args[0] == zstdName }

// DecodeZstd decodes stdin to stdout and returns the exit code of the process.
func DecodeZstd() int {
	// Above all that is on the node: see zstdDecoder.
	err := os.WriteFile("/proc/self/oom_score_adj", []byte("1000"), 0)
	if err == nil {
		err = decodeZstd(os.Stdin, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func decodeZstd(packed io.Reader, plain io.Writer) error {
	// Of one goroutine and with little ahead of it, a decoder takes the window and 1 MiB.
	// The limit of the memory is that of a frame which is one segment and has no window.
	decoder, err := zstd.NewReader(packed, zstd.WithDecoderLowmem(true), zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderMaxMemory(maxWindow))
	if err != nil {
		return err
	}
	defer decoder.Close()
	_, err = io.Copy(plain, decoder)
	if errors.Is(err, zstd.ErrWindowSizeExceeded) || errors.Is(err, zstd.ErrDecoderSizeExceeded) {
		return fmt.Errorf("the window of a frame is larger than %d MiB: %w", maxWindow>>20, err)
	}
	return err
}
