package nri

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/status"
)

// turn is one request, which goes to one plugin after another. The library holds
// its lock from the first to the last of them; a turn releases it while a plugin
// is asked and takes it again before the answer is looked at. Everything that the
// library does between two questions it does under its lock, and it goes through
// a list of plugins that is replaced, never changed.
type turn struct {
	adaptation *adaptation.Adaptation
	// uncounted is set if no plugin is to be asked (see Plugins.Connected), and
	// has the number of those that would have been.
	uncounted *atomic.Int64
	// connected are the names of all plugins that are there.
	connected []string

	// mu guards what follows. Validators are asked side by side.
	mu sync.Mutex
	// block keeps plugins from being synchronized until the request has its list
	// of plugins.
	block  *adaptation.PluginSyncBlock
	asking int
}

type turnKey struct{}

// begin starts a request about something that is noted by note first, under p.mu: a
// plugin that is synchronized later finds it, one that was before is asked. The turn
// is nil while NRI is off.
func (p *Plugins) begin(ctx context.Context, note func()) (context.Context, *turn) {
	a := p.adaptation.Load()
	if a == nil {
		return ctx, nil
	}
	t := &turn{adaptation: a, block: a.BlockPluginSync()}
	p.mu.Lock()
	if p.adaptation.Load() == a { // or the entry would stay for good
		note()
	}
	p.mu.Unlock()
	return context.WithValue(ctx, turnKey{}, t), t
}

// end is called when the request has ended; no plugin may have been asked.
func (t *turn) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.block.Unblock()
}

// leave releases the library's lock for a question, enter takes it again.
func (t *turn) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.asking++; t.asking == 1 {
		t.block.Unblock()
		t.adaptation.Unlock()
	}
}

func (t *turn) enter() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.asking--; t.asking == 0 {
		t.adaptation.Lock()
	}
}

// ask is between the library and a plugin's connection. What is no turn of ours
// (registration, synchronization) is asked without the library's lock, but at
// the start of the daemon.
func ask(ctx context.Context, request *ttrpc.Request, response *ttrpc.Response, _ *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
	t, ours := ctx.Value(turnKey{}).(*turn)
	if !ours {
		return invoke(ctx, request, response)
	}
	if t.uncounted != nil {
		t.uncounted.Add(1)
		return nil
	}
	t.leave()
	defer t.enter()
	err := invoke(ctx, request, response)
	if err == nil {
		err = status.ErrorProto(response.GetStatus()) // what ttrpc makes of it
	}
	if err != nil {
		return &answerError{err: err}
	}
	return nil
}
