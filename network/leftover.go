package network

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"sync"
	"time"
)

// leftover are the plugins that an earlier daemon, which was killed, left
// running for one attachment. They may finish: one that is killed half-way can
// leave what no DEL finds again (bridge deletes the interface first, from which
// it has read the masquerade rules that it then removes). Until they have, the
// attachment is locked, because an ADD must not run beside the DEL that undoes
// it; nobody else waits.
type leftover struct {
	run    run
	unlock func()
}

// findLeftovers locks the attachments of leftovers. Plugins that run for no
// attachment, for STATUS and GC, are ended: nobody waits for their answer.
func (n *CNI) findLeftovers(ctx context.Context) ([]leftover, error) {
	runs := make(map[string]run)
	err := n.plugins.each(func(environment [][]byte) (kill bool) {
		verb, id := value(environment, "CNI_COMMAND="), value(environment, "CNI_CONTAINERID=")
		if verb != "" && has(environment, n.plugins.mark) {
			runs[cmp.Or(id, verb)] = run{verb: verb, id: id, limit: n.limitOf(verb)}
		}
		return false
	})
	var found []leftover
	for _, r := range runs {
		if err != nil {
			break
		}
		a := n.find(r.id)
		if a == nil {
			err = n.plugins.endRest(ctx, r)
			continue
		}
		l := leftover{run: r}
		l.unlock, err = n.lock(ctx, a)
		found = append(found, l)
	}
	if err != nil {
		return nil, fmt.Errorf("find the plugins of an earlier daemon: %w", err)
	}
	return found, nil
}

func (n *CNI) limitOf(verb string) time.Duration {
	switch verb {
	case "ADD":
		return n.options.Limits.Add
	case "CHECK":
		return n.options.Limits.Check
	default:
		return n.options.Limits.Del
	}
}

// awaitLeftovers unlocks each attachment when its leftovers have ended, and
// ends them when they take longer than their verb may.
func (n *CNI) awaitLeftovers(ctx context.Context) {
	var wait sync.WaitGroup
	for _, l := range n.leftovers {
		wait.Go(func() {
			defer l.unlock()
			// Where the daemon ends first, the next one finds them again.
			if err := n.plugins.await(ctx, l.run); err != nil && ctx.Err() == nil {
				n.options.Logger.Error("plugins of an earlier daemon", "verb", l.run.verb, "sandbox", l.run.id, "err", err)
			}
		})
	}
	wait.Wait()
}

// await returns when no process of the run is left. After the run's limit it
// kills them; with the context it gives up.
func (p *plugins) await(ctx context.Context, r run) error {
	end, ofRun := time.Now().Add(r.limit), p.of(r)
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		running := false
		err := p.each(func(environment [][]byte) (kill bool) {
			if !ofRun(environment) {
				return false
			}
			running = true
			return !time.Now().Before(end)
		})
		if err != nil || !running {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// value of the variable that the prefix NAME= names.
func value(environment [][]byte, prefix string) string {
	for _, v := range environment {
		if text, found := strings.CutPrefix(string(v), prefix); found {
			return text
		}
	}
	return ""
}
