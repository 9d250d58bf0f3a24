package inspect

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/test/harness"
)

// Serve returns when the requests that change images have ended, also one whose client sends nothing more: what
// they work with is closed then. Others are refused when the daemon drains.
func TestServeWaitsForAnImport(t *testing.T) {
	store, err := image.Open(t.Context(), image.Config{Root: t.TempDir(), Logger: slog.New(slog.DiscardHandler)})
	harness.Check(t, err)
	defer store.Close()
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	harness.Check(t, err)
	entered, draining, left := make(chan struct{}, 1), atomic.Bool{}, atomic.Bool{}
	server := &Server{Images: store, Metrics: http.NotFoundHandler(), Enter: func() (func(), error) {
		if draining.Load() {
			return nil, errors.New("draining")
		}
		entered <- struct{}{}
		return func() { time.Sleep(100 * time.Millisecond); left.Store(true) }, nil
	}}
	ctx, end := context.WithCancel(t.Context())
	defer end()
	served := make(chan error, 1)
	go func() { served <- server.Serve(ctx, listener) }()
	body, sender := io.Pipe()
	defer sender.Close()
	imported := make(chan struct{})
	go func() {
		defer close(imported)
		if answer, err := NewClient(socket).Call(t.Context(), http.MethodPost, "/images/import", body); err == nil {
			_ = answer.Body.Close()
			t.Error("the import has succeeded")
		}
	}()
	<-entered
	draining.Store(true)
	err = NewClient(socket).Do(t.Context(), http.MethodDelete, "/images/name?name=a")
	harness.Want(t, err != nil && err.Error() == "draining", "a change while the daemon drains: %v", err)
	end()
	err = <-served
	harness.Want(t, err == nil && left.Load(), "Serve returns %v, the import has ended: %v", err, left.Load())
	_ = sender.Close()
	<-imported
}
