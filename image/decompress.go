package image

import (
	"bufio"
	"bytes"
	"cmp"
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
// places.
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
	io.Reader
	command *exec.Cmd
	end     func() error // waits for the process and returns why it failed
	cancel  context.CancelFunc
}

// startZstd starts the decoder. ended is called when it has ended, or has not begun.
func startZstd(ctx context.Context, packed io.Reader, ended func()) (io.ReadCloser, error) {
	running, cancel := context.WithCancel(ctx)
	command, stderr := exec.CommandContext(running, "/proc/self/exe"), &bytes.Buffer{}
	command.Args, command.Env = []string{zstdName}, []string{"GOMAXPROCS=1"}
	command.Stdin, command.Stderr = packed, stderr
	plain, err := command.StdoutPipe()
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		cancel()
		ended()
		return nil, fmt.Errorf("start the zstd decoder: %w", err)
	}
	end := sync.OnceValue(func() error {
		defer ended()
		defer cancel()
		err := command.Wait()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case command.ProcessState.ExitCode() < 0:
			return fmt.Errorf("the zstd decoder was ended (%w), by the kernel if memory ran out: %w", err, errdefs.ErrResourceExhausted)
		}
		return fmt.Errorf("zstd: %s", cut(strings.TrimSpace(stderr.String()), maxWords))
	})
	return zstdDecoder{Reader: plain, command: command, end: end, cancel: cancel}, nil
}

func (d zstdDecoder) Read(p []byte) (int, error) {
	n, err := d.Reader.Read(p)
	if err != nil && n == 0 {
		err = cmp.Or(d.end(), err)
	}
	return n, err
}

// Close ends the process if it has not come to its end.
func (d zstdDecoder) Close() error {
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
