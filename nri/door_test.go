package nri

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
)

// external is a plugin that connects by itself, and says when its connection ends.
type external struct {
	stub.Stub
	ended chan struct{}
}

func connectExternal(t *testing.T, p *Plugins, socket, index string, plugin any) external {
	e := external{ended: make(chan struct{})}
	var err error
	e.Stub, err = stub.New(plugin, stub.WithSocketPath(socket), stub.WithPluginName("slow"), stub.WithPluginIdx(index), stub.WithOnClose(sync.OnceFunc(func() { close(e.ended) })))
	harness.Check(t, err)
	harness.Check(t, e.Start(t.Context()))
	t.Cleanup(e.Stop)
	awaitThat(t, "the plugin is connected", func() bool { return slices.Contains(p.Connected(), index+"-slow") })
	return e
}

func awaitThat(t *testing.T, what string, is func() bool) {
	harness.Eventually(t, what, time.Minute, is)
}

func (e external) awaitEnd(t *testing.T) {
	t.Helper()
	select {
	case <-e.ended:
	case <-time.After(time.Minute):
		t.Fatal("the plugin was not disconnected within a minute")
	}
}

// NRI switched off, or over to another directory, disconnects plugins that have connected by themselves: nothing of
// them is left, and what they want is refused. Those that are not back are named. The library's own socket takes none.
func TestSwitchedOffIsOff(t *testing.T) {
	p, socket := open(t, time.Minute)
	none, err := net.Dial("unix", socket) // it registers nothing
	harness.Check(t, err)
	_, err = none.Write([]byte("none"))
	harness.Check(t, errors.Join(err, none.Close()))
	d := p.door.Load()
	awaitThat(t, "it has left", func() bool { d.mu.Lock(); defer d.mu.Unlock(); return d.current != nil && len(d.links) == 0 })
	stranger, err := stub.New(idle{}, stub.WithSocketPath(d.library), stub.WithPluginName("slow"), stub.WithPluginIdx("10"))
	harness.Check(t, err)
	harness.WantError(t, stranger.Start(t.Context()), "plugins connect to nri.socket")
	off, elsewhere := p.options, p.options
	off.Enabled = false
	elsewhere.PluginDir = t.TempDir()
	switchOver := func(options Options) { harness.Check(t, p.Reconfigure(options)) }
	cycle := func() {
		plugin := connectExternal(t, p, socket, "10", idle{})
		switchOver(off)
		plugin.awaitEnd(t)
		switchOver(p.options)
		problems := fmt.Sprint(p.Problems(p.Connected()))
		harness.Want(t, strings.Contains(problems, "10-slow"), "a plugin that is not back is no problem: %s", problems)
		again := connectExternal(t, p, socket, "10", idle{})
		harness.Same(t, "the plugin is back", p.Problems(p.Connected()), nil)
		switchOver(elsewhere)
		again.awaitEnd(t)
		_, err := again.UpdateContainers([]*api.ContainerUpdate{{ContainerId: "c"}})
		harness.Want(t, err != nil, "a plugin that was disconnected has updated a container")
		switchOver(off)
	}
	cycle()
	goroutines, files := runtime.NumGoroutine(), descriptors(t)
	for range 5 {
		switchOver(p.options)
		cycle()
	}
	awaitThat(t, "no goroutine and no descriptor is left", func() bool {
		return runtime.NumGoroutine() <= goroutines && descriptors(t) <= files
	})
}

func descriptors(t *testing.T) int {
	files, err := os.ReadDir("/proc/self/fd")
	harness.Check(t, err)
	return len(files)
}

// Several plugins that do not register hold up the start once, and end with what they
// have started, in sessions of its own too.
func TestMutePlugins(t *testing.T) {
	const many, registration = 4, 3 * time.Second
	dir := t.TempDir()
	for i := range many {
		script := fmt.Sprintf("#!/bin/sh\nsleep 1000 &\necho $! >>%[1]s/children\nsetsid sh -c 'echo $$ >>%[1]s/children; exec sleep 1000' &\nwait\n", dir)
		harness.Check(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("1%d-mute", i)), []byte(script), 0o700))
	}
	p := newPlugins(t, dir, registration, time.Minute)
	began := time.Now()
	harness.Check(t, p.Open(nonePods{}, none{}))
	took := time.Since(began)
	harness.Want(t, took <= (many-1)*registration, "the start took %v, one registration may take %v", took, registration)
	problems := p.Problems(p.Connected())
	harness.Want(t, len(problems) == many, "problems: %v", problems)
	content := harness.Read(t, filepath.Join(dir, "children"))
	for child := range strings.FieldsSeq(string(content)) {
		pid, err := strconv.Atoi(child)
		harness.Check(t, err)
		awaitThat(t, "what a plugin has started is ended", func() bool { return gone(pid) })
	}
}

// The first process of a plugin ends, and a descendant in a session of its own holds the
// connection. Until that ends the pid stays taken, also if orphans are reaped: no other
// process is killed for it, and what is left in its process group is.
func TestPIDOfAPluginThatHasEnded(t *testing.T) {
	harness.Check(t, process.Adopt())
	ctx, stop := context.WithCancel(t.Context())
	var wait sync.WaitGroup
	wait.Go(func() { process.ReapOrphans(ctx, nil) })
	defer wait.Wait()
	defer stop()
	dir := t.TempDir()
	pids := filepath.Join(dir, "pids")
	script := fmt.Sprintf("#!/bin/sh\nsetsid sleep 1000 &\nholder=$!\nsleep 1000 3>&- &\necho $$ $holder $! >%[1]s.new\nmv %[1]s.new %[1]s\n", pids)
	harness.Check(t, os.WriteFile(filepath.Join(dir, "10-ends"), []byte(script), 0o700))
	p := newPlugins(t, dir, time.Minute, time.Minute)
	opened := make(chan error, 1)
	go func() { opened <- p.Open(nonePods{}, none{}) }()
	var first, holder, member int
	awaitThat(t, "the plugin has written its pids", func() bool {
		content, _ := os.ReadFile(pids)
		n, _ := fmt.Sscan(string(content), &first, &holder, &member)
		return n == 3 && gone(first)
	})
	time.Sleep(3 * time.Second) // orphans are reaped after two
	stat, err := process.ReadStat(first)
	harness.Want(t, err == nil && stat.Parent == os.Getpid(), "the pid of the plugin may be another process's: %+v, %v", stat, err)
	harness.Check(t, unix.Kill(holder, unix.SIGKILL))
	awaitThat(t, "what is left in the plugin's group is ended", func() bool { return gone(member) })
	awaitThat(t, "the plugin is reaped", func() bool {
		_, err := process.ReadStat(first)
		return errors.Is(err, process.ErrGone)
	})
	harness.Check(t, <-opened)
}

// gone reports whether a process has ended; as an orphan it may not be reaped yet.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) || strings.Contains(string(stat), ") Z ")
}

// late is a plugin whose synchronization takes until it is told to answer.
type late struct {
	begun, answer chan struct{}
	seen          chan string
}

func (l late) Synchronize(context.Context, []*api.PodSandbox, []*api.Container) ([]*api.ContainerUpdate, error) {
	close(l.begun)
	<-l.answer
	return nil, nil
}

func (l late) RunPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	l.seen <- pod.GetName()
	return nil
}

// What is made while a plugin joins is seen by it, also if it takes longer for that than it may for another answer.
func TestMadeWhileAPluginJoins(t *testing.T) {
	const limit = time.Second
	p, socket := open(t, limit)
	l := late{begun: make(chan struct{}), answer: make(chan struct{}), seen: make(chan string, 10)}
	s, err := stub.New(l, stub.WithSocketPath(socket), stub.WithPluginName("slow"), stub.WithPluginIdx("10"), stub.WithOnClose(func() {}))
	harness.Check(t, err)
	harness.Check(t, s.Start(t.Context()))
	defer s.Stop()
	<-l.begun
	const many = 3
	var wait sync.WaitGroup
	for i := range many {
		wait.Go(func() { harness.Same(t, "an error", p.run(t.Context(), fmt.Sprint(i)), nil) })
	}
	time.Sleep(2 * limit)
	close(l.answer)
	wait.Wait()
	harness.Want(t, len(l.seen) == many, "of %d pods that were made while it was synchronized, the plugin has seen %d", many, len(l.seen))
}

// TestSurveyBesideAFifo: the configuration of a plugin may be anything; a fifo that
// nobody writes holds up nobody, and costs its own plugin only.
func TestSurveyBesideAFifo(t *testing.T) {
	source := Source{Enabled: true, PluginDir: t.TempDir(), ConfigDir: t.TempDir()}
	for _, plugin := range []string{"10-good", "20-fifo"} {
		harness.Check(t, os.WriteFile(filepath.Join(source.PluginDir, plugin), nil, 0o700))
	}
	harness.Check(t, unix.Mkfifo(filepath.Join(source.ConfigDir, "fifo.conf"), 0o600))
	plugins, problems := source.Survey()
	harness.Want(t, slices.Equal(plugins, []string{"10-good"}), "plugins that are started: %v", plugins)
	harness.Want(t, len(problems) == 1 && strings.Contains(problems[0].Error(), "20-fifo") &&
		strings.Contains(problems[0].Error(), "no regular file"), "problems: %v", problems)
}
