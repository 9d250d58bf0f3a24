package nri

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/sandbox"
)

// door passes each plugin's connection on to the socket of the library, until NRI is switched
// off. The library cannot disconnect a plugin, waits for one registration after another, and
// kills only the first process of a plugin that it starts; the door does these things.
type door struct {
	plugins     *Plugins
	library     string                 // the path of the library's socket
	adaptation  *adaptation.Adaptation // the library
	listener    net.Listener           // nil if no plugin may connect by itself
	wait        sync.WaitGroup         // for the goroutines of links
	introducing sync.Mutex             // held by introduce: the library registers one plugin at a time
	off         context.Context        // ends when the door is shut
	end         context.CancelFunc

	mu             sync.Mutex // guards what follows, and the links
	links          map[*link]struct{}
	current        *link                       // the library registers or synchronizes it
	podsMade       map[string]*sandbox.Sandbox // by ID: plugins were asked, but it is not listed yet
	containersMade map[string]*api.Container   // likewise
	launched       []string                    // plugins that we started
	skipped        []error                     // why others of the directory were not started
}

type link struct {
	plugin  net.Conn
	command *exec.Cmd     // nil if it has connected by itself
	release func()        // of process.Claim, if we started it
	config  string        // its configuration, if we started it
	name    string        // INDEX-NAME, "" until it has registered
	joined  bool          // it is synchronized
	settled chan struct{} // closed when it has joined or failed
	over    chan struct{} // closed when the connection has ended
}

// openDoor listens for plugins at the configured socket, if there is one.
func (p *Plugins) openDoor(source Source) (d *door, err error) {
	d = &door{
		plugins: p, library: filepath.Join(p.options.State, "nri.sock"), links: make(map[*link]struct{}),
		podsMade: make(map[string]*sandbox.Sandbox), containersMade: make(map[string]*api.Container),
	}
	d.off, d.end = context.WithCancel(context.Background())
	if source.Socket == "" {
		return d, nil
	}
	_ = os.Remove(source.Socket) // nobody listens there: CheckSocket
	if err := os.MkdirAll(filepath.Dir(source.Socket), 0o700); err != nil {
		return nil, err
	}
	d.listener, err = socket.ListenPrivate(source.Socket)
	return d, err
}

func (d *door) enter(l *link) {
	l.settled, l.over = make(chan struct{}), make(chan struct{})
	d.mu.Lock()
	defer d.mu.Unlock()
	d.links[l] = struct{}{}
	d.wait.Go(func() { d.serve(l) })
}

// serve connects a plugin to the library until one of them or the door ends it. It waits for the
// plugin's first bytes, so that a silent plugin does not hold up the library.
func (d *door) serve(l *link) {
	defer d.leave(l)
	stop := context.AfterFunc(d.off, func() { _ = l.plugin.Close() })
	defer stop()
	limit := d.plugins.settings().Registration
	_ = l.plugin.SetReadDeadline(time.Now().Add(limit)) // fails as Read does
	first := make([]byte, 4096)
	n, err := l.plugin.Read(first)
	_ = l.plugin.SetReadDeadline(time.Time{})
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("it has said nothing within %v (nri.registration_timeout)", limit)
	}
	if err == nil {
		err = d.introduce(l, first[:n])
	}
	if err == nil {
		<-l.over
	} else if d.off.Err() == nil {
		d.plugins.options.Logger.Warn("an NRI plugin has not registered", "plugin", l.name, "err", err)
	}
}

// introduce connects a plugin to the library, and returns when it has joined or failed.
func (d *door) introduce(l *link, first []byte) error {
	d.introducing.Lock()
	defer d.introducing.Unlock()
	library, err := net.Dial("unix", d.library)
	if err != nil {
		return err
	}
	d.mu.Lock()
	d.current = l
	d.mu.Unlock()
	over := sync.OnceFunc(func() { close(l.over) })
	carry := func(to, from net.Conn) {
		_, _ = io.Copy(to, from)
		_ = to.Close()
		_ = from.Close()
		over()
	}
	_, err = library.Write(first)
	d.wait.Go(func() { carry(library, l.plugin) })
	d.wait.Go(func() { carry(l.plugin, library) })
	select {
	case <-l.settled:
	case <-l.over:
	}
	return err
}

// leave forgets a plugin whose connection has ended. It kills one that we started: its process
// tree, and its process group, which holds processes whose parent has exited. Only leave reaps the
// plugin's first process, so its PID and group are not reused before.
func (d *door) leave(l *link) {
	_ = l.plugin.Close()
	if l.command != nil {
		process.KillTree(l.command.Process.Pid)
		_ = unix.Kill(-l.command.Process.Pid, unix.SIGKILL)
		_ = l.command.Wait() // killed
		l.release()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.links, l)
	if !l.joined {
		close(l.settled)
	}
}

// close ends all connections, and returns the plugins that had connected by themselves.
func (d *door) close() (external []string) {
	d.mu.Lock()
	for l := range d.links {
		if l.joined && l.command == nil {
			external = append(external, l.name)
		}
	}
	d.mu.Unlock()
	d.end()
	if d.listener != nil {
		_ = d.listener.Close()
	}
	d.wait.Wait()
	return external
}

// hasJoined reports whether requests reach a plugin. door.mu is held, and BlockPluginSync keeps others from joining.
func (d *door) hasJoined() bool {
	for l := range d.links {
		if l.joined {
			return true
		}
	}
	return false
}

// synchronized notes that the current plugin has been synchronized, and returns its name.
func (d *door) synchronized() (name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.current
	if l == nil || l.joined {
		return "" // the library's own plugins
	}
	if _, here := d.links[l]; !here {
		return "" // it has left meanwhile
	}
	l.joined = true
	close(l.settled)
	return l.name
}

// hear intercepts registrations: a plugin that we started is named after its file.
func (d *door) hear(ctx context.Context, unmarshal ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
	return method(ctx, func(message any) error {
		err := unmarshal(message)
		d.mu.Lock()
		defer d.mu.Unlock()
		r, is := message.(*api.RegisterPluginRequest)
		l := d.current
		_, here := d.links[l]
		switch {
		case !is || err != nil:
			return err
		case !here || l.joined: // nothing could disconnect it
			return fmt.Errorf("%s is the daemon's own: plugins connect to nri.socket", d.library)
		case l.command != nil:
			r.PluginIdx, r.PluginName, _ = api.ParsePluginName(l.name)
		default:
			l.name = cmp.Or(r.GetPluginIdx(), "??") + "-" + r.GetPluginName()
		}
		return nil
	})
}

// ask intercepts requests to plugins: the library does not know the configuration of one that connects.
func (d *door) ask(ctx context.Context, request *ttrpc.Request, response *ttrpc.Response, _ *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
	if request.GetMethod() == "Configure" {
		configure := &api.ConfigureRequest{}
		if err := proto.Unmarshal(request.GetPayload(), configure); err != nil {
			return err
		}
		d.mu.Lock()
		configure.Config = d.current.config
		d.mu.Unlock()
		var err error
		if request.Payload, err = proto.Marshal(configure); err != nil {
			return err
		}
	}
	return invoke(ctx, request, response)
}
