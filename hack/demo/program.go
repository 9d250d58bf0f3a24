package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"
)

// crashCode is the exit code of the server when it crashes on request.
const crashCode = 42

// serve answers HTTP requests on an address until a request for /crash.
func serve(ctx context.Context, address string) error {
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		name, _ := os.Hostname()
		fmt.Fprintf(w, "hello from process %d of %s\n", os.Getpid(), name)
	})
	mux.HandleFunc("/crash", func(http.ResponseWriter, *http.Request) { os.Exit(crashCode) })
	server := &http.Server{Addr: address, Handler: mux, ReadHeaderTimeout: time.Second}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	// A connection that multipath TCP accepts has the kernel's own SELinux label before
	// Linux 6.5, and no container may read it.
	var plain net.ListenConfig
	plain.SetMultipathTCP(false)
	listener, err := plain.Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return server.Serve(listener)
}

// askTimeout limits the wait for a server that is just starting.
const askTimeout = 10 * time.Second

// ask prints the response of a URL, and retries while the connection is refused.
func ask(ctx context.Context, url string, output io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	for {
		answer, err := get(ctx, url)
		if err == nil {
			_, err = output.Write(answer)
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func get(ctx context.Context, url string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	return io.ReadAll(response.Body)
}
