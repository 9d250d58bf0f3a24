package inspect

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/timeline"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/test/harness"
)

func write[T any](t testing.TB, directory, id string, version int, record T) {
	records, err := state.Open[T](directory, version, false)
	harness.Check(t, err)
	harness.Check(t, records.Write(id, record))
}

func encoded(t testing.TB, message proto.Message) json.RawMessage {
	data, err := protojson.Marshal(message)
	harness.Check(t, err)
	return data
}

// files are the directories of a daemon that does not run, with some pods of one
// container each, and as many lives of pods that have failed.
func files(t testing.TB, pods int) Files {
	f := Files{Root: t.TempDir(), State: t.TempDir(), Netns: func(id string) string { return "/run/netns/" + id }}
	lives, err := step.OpenLives(filepath.Join(f.Root, "lives"))
	harness.Check(t, err)
	rows := []step.Row{}
	for i := range 20 {
		rows = append(rows, step.Row{Kind: "pod", Step: fmt.Sprint("step", i), Start: time.Now(), Took: time.Millisecond})
	}
	for i := range pods {
		pod, ctr := object.NewID(), object.NewID()
		metadata := &runtimeapi.PodSandboxMetadata{Name: fmt.Sprint("web", i), Namespace: "test", Uid: fmt.Sprint(i)}
		write(t, filepath.Join(f.Root, "sandboxes"), pod, 1, sandbox.Record{ID: pod, Config: encoded(t, &runtimeapi.PodSandboxConfig{Metadata: metadata})})
		write(t, filepath.Join(f.State, "facts"), pod, 1, sandbox.Facts{ReadyAt: time.Now(), Timeline: rows})
		write(t, filepath.Join(f.Root, "containers"), ctr, 1, container.Record{ID: ctr, SandboxID: pod, Config: encoded(t, &runtimeapi.ContainerConfig{
			Metadata: &runtimeapi.ContainerMetadata{Name: "app"}, Envs: []*runtimeapi.KeyValue{{Key: "PLAIN", Value: []byte("S3CRET")}},
		})})
		write(t, filepath.Join(f.Root, "container-facts"), ctr, 1, container.Facts{StartedAt: 1, Timeline: rows[:3]})
		failed := append([]step.Row{}, rows...)
		failed[19].Error = "no address"
		harness.Check(t, lives.Keep(step.Life{Kind: "pod", ID: object.NewID(), Name: fmt.Sprint("test/gone", i), End: time.Now(), Error: "step19: no address", Rows: failed}))
	}
	return f
}

func one(t *testing.T, f Files, wanted string) timeline.Pod {
	pods, err := f.Timelines(wanted)
	harness.Check(t, err)
	harness.Need(t, len(pods) == 1, "%q: %d pods", wanted, len(pods))
	return pods[0]
}

func TestTimelinesOfFiles(t *testing.T) {
	f := files(t, 3)
	web := one(t, f, "web1")
	harness.Want(t, web.Name == "test/web1", "%+v", web)
	harness.Want(t, web.State == timeline.Ready, "%+v", web)
	harness.Want(t, len(web.Rows) == 20, "%+v", web)
	harness.Want(t, len(web.Containers) == 1, "%+v", web)
	harness.Want(t, web.Containers[0].State == "running", "%+v", web)
	for _, wanted := range []string{"test/web1", web.ID, web.ID[:12], web.Containers[0].ID[:12], "test/web1/app"} {
		harness.Same(t, wanted, one(t, f, wanted).ID, web.ID)
	}
	gone := one(t, f, "gone2")
	harness.Want(t, gone.State == timeline.Failed, "%+v", gone)
	harness.Want(t, len(gone.Problems()) > 0, "%+v", gone)
	harness.Want(t, len(gone.Rows) == 20, "%+v", gone)
	all, err := f.Timelines("")
	harness.Check(t, err)
	text, err := json.Marshal(all)
	harness.Check(t, err)
	harness.Want(t, len(all) == 6 && !bytes.Contains(text, []byte("S3CRET")), "%d pods: %s", len(all), text)
	none, err := f.Timelines("nothing")
	harness.Want(t, err == nil && len(none) == 0, "%v, %v", none, err)
}

// A container whose pod's own life is gone is still found.
func TestContainerOfAPodThatIsGone(t *testing.T) {
	f := files(t, 1)
	lives, err := step.OpenLives(filepath.Join(f.Root, "lives"))
	harness.Check(t, err)
	pod := object.NewID()
	harness.Check(t, lives.Keep(step.Life{Kind: "container", ID: object.NewID(), Pod: pod, Name: "test/old/db", End: time.Now(), Error: "create: no room", Rows: []step.Row{{Kind: "container", Step: "create", Error: "no room", Start: time.Now()}}}))
	for _, wanted := range []string{"old", "test/old", "db", pod[:10]} {
		if got := one(t, f, wanted); got.Name != "test/old" || got.State != timeline.Removed || len(got.Containers) != 1 || got.Containers[0].Name != "db" {
			t.Errorf("%q: %+v", wanted, got)
		}
	}
}

// A daemon that is stopped, or wedged, holds up no command; one that is not there is told apart from it.
func TestDaemonThatDoesNotAnswer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	client := NewClient(path)
	if _, err := client.Timelines(t.Context(), ""); !errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrNoAnswer) || !strings.Contains(err.Error(), "start it") {
		t.Errorf("without a daemon: %v", err)
	}
	listener, err := net.Listen("unix", path) // it accepts nothing
	harness.Check(t, err)
	client.limit = 100 * time.Millisecond
	_, err = client.Timelines(t.Context(), "")
	client.limit = time.Minute
	harness.Want(t, errors.Is(err, ErrNoAnswer), "with a daemon that does not answer: %v", err)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = client.Glance(canceled)
	harness.Want(t, errors.Is(err, context.Canceled) && !errors.Is(err, ErrNoAnswer), "when the caller has left: %v", err)
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	harness.Check(t, listener.Close())
	_, err = client.Read(t.Context(), "/metrics")
	harness.Want(t, errors.Is(err, syscall.ECONNREFUSED), "after the daemon has ended: %v", err)
}

// Serve returns when the requests that change images have ended, also one whose client sends nothing more: what
// they work with is closed then. Others are refused when the daemon drains.
func TestServeWaitsForAnImport(t *testing.T) {
	store, err := image.Open(t.Context(), image.Config{Root: t.TempDir(), Logger: slog.New(slog.DiscardHandler)})
	harness.Check(t, err)
	defer store.Close()
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	harness.Check(t, err)
	entered, leaving, leave, draining := make(chan struct{}, 1), make(chan struct{}), make(chan struct{}), atomic.Bool{}
	server := &Server{Images: store, Metrics: http.NotFoundHandler(), Enter: func() (func(), error) {
		if draining.Load() {
			return nil, errors.New("draining")
		}
		entered <- struct{}{}
		return func() { close(leaving); <-leave }, nil
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
	<-leaving
	harness.Same(t, "ends of Serve before that of the import", len(served), 0)
	close(leave)
	harness.Check(t, <-served)
	_ = sender.Close()
	<-imported
}
