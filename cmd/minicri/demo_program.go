package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"syscall"
	"time"
)

// What the containers of the demo run is minicri itself: it is static, and
// needs nothing else in its image.
const (
	demoServe = "--serve" // ADDRESS: answer who asks, crash when told to
	demoAsk   = "--ask"   // URL: print the answer
)

// crashCode is the exit code of the server when it is told to crash.
const crashCode = 42

// serveDemo answers on an address until it is told to crash.
func serveDemo(ctx context.Context, address string) error {
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		name, _ := os.Hostname()
		fmt.Fprintf(w, "hello from process %d of %s\n", os.Getpid(), name)
	})
	mux.HandleFunc("/crash", func(http.ResponseWriter, *http.Request) { os.Exit(crashCode) })
	server := &http.Server{Addr: address, Handler: mux, ReadHeaderTimeout: time.Second}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	return server.ListenAndServe()
}

// askPatience is how long a server may take to be there.
const askPatience = 10 * time.Second

// askDemo prints what is at a URL, as soon as there is an answer.
func askDemo(ctx context.Context, url string, output io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	for {
		answer, err := get(ctx, url)
		if err == nil {
			_, err = output.Write(answer)
		}
		if !errors.Is(err, syscall.ECONNREFUSED) { // there is one, whatever it says
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
