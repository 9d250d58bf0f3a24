package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// firstByte is how long an exec takes to be heard of.
func (t *target) firstByte(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	out := &counter{}
	if err := t.exec(ctx, out, "echo", "x"); err != nil {
		return 0, err
	}
	if out.count != 2 {
		return 0, fmt.Errorf("%s: an exec has an output of %d bytes", t.node.Name, out.count)
	}
	return out.first.Sub(began), nil
}

// execOutput has a command write.
func (t *target) execOutput(ctx context.Context) error {
	out := &counter{}
	return errors.Join(t.exec(ctx, out, zeros...), out.check())
}

func (t *target) exec(ctx context.Context, out io.Writer, command ...string) error {
	answer, err := t.node.CRI.Exec(ctx, &runtimeapi.ExecRequest{ContainerId: t.container, Cmd: command, Stdout: true, Stderr: true})
	if err != nil {
		return err
	}
	u, err := url.Parse(answer.GetUrl())
	if err != nil {
		return err
	}
	executor, err := remotecommand.NewSPDYExecutor(&rest.Config{}, http.MethodPost, u)
	if err != nil {
		return err
	}
	return executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: out, Stderr: io.Discard})
}

// forward reads what the port of the pod sends. It does so without the
// listener of kubectl: there is one copy less to be measured.
func (t *target) forward(ctx context.Context) error {
	const port = 7
	answer, err := t.node.CRI.PortForward(ctx, &runtimeapi.PortForwardRequest{PodSandboxId: t.pod.ID, Port: []int32{port}})
	if err != nil {
		return err
	}
	u, err := url.Parse(answer.GetUrl())
	if err != nil {
		return err
	}
	transport, upgrader, err := spdy.RoundTripperFor(&rest.Config{})
	if err != nil {
		return err
	}
	dialer := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, u)
	conn, _, err := dialer.Dial(portforward.PortForwardProtocolV1Name)
	if err != nil {
		return err
	}
	defer conn.Close()
	headers := http.Header{}
	headers.Set(corev1.PortHeader, strconv.Itoa(port))
	headers.Set(corev1.PortForwardRequestIDHeader, "0")
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	failures, err := conn.CreateStream(headers)
	if err != nil {
		return err
	}
	_ = failures.Close() // nothing is to be written
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := conn.CreateStream(headers)
	if err != nil {
		return err
	}
	_ = data.Close()
	out := &counter{}
	var failure []byte
	var wait sync.WaitGroup
	wait.Go(func() { failure, _ = io.ReadAll(failures) })
	_, err = io.Copy(out, data)
	wait.Wait()
	if len(failure) > 0 {
		err = errors.Join(err, errors.New(string(failure)))
	}
	return errors.Join(err, out.check())
}

// counter counts bytes.
type counter struct {
	count int
	first time.Time
}

// Write implements io.Writer.
func (c *counter) Write(p []byte) (int, error) {
	if c.count == 0 {
		c.first = time.Now()
	}
	c.count += len(p)
	return len(p), nil
}

func (c *counter) check() error {
	if c.count != transferMiB<<20 {
		return fmt.Errorf("%d bytes arrived instead of %d", c.count, transferMiB<<20)
	}
	return nil
}
