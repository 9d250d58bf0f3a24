package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	gocni "github.com/containerd/go-cni"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/minicri/minicri/network/runner"
)

// plugins runs the verbs of CNI, each as a run of its own.
type plugins struct {
	runner  *runner.Runner
	binDirs []string
	limits  *atomic.Pointer[limitsInForce]
	// gcCache is the cache that libcni's GC reads.
	gcCache string
	// daemon is the context that ends with the daemon.
	daemon  context.Context
	observe func(plugin, verb string, took time.Duration, ok bool)
	logger  *slog.Logger

	// mu guards lingering, and when one of them got stuck.
	mu        sync.Mutex
	lingering map[*linger]bool
}

func (p *plugins) add(ctx context.Context, a Attachment, path string) (result *gocni.Result, o outcome) {
	o = p.call(ctx, runner.Request{Verb: "ADD", ID: a.ID, Network: a.Network, Limit: p.limits.Load().Add}, a.Config, func(ctx context.Context, cni gocni.CNI) (err error) {
		// Not Setup, which reads answers in goroutines of its own, where no code of ours could
		// recover from them.
		result, err = cni.SetupSerially(ctx, a.ID, path, a.options()...)
		return err
	})
	return result, o
}

// del succeeds if every plugin of the chain does. go-cni takes an error for
// success whose text has "not found" in it, or "no such file or directory"; so
// what the plugins themselves answered counts.
func (p *plugins) del(ctx context.Context, a Attachment, path string) outcome {
	return p.call(ctx, runner.Request{Verb: "DEL", ID: a.ID, Network: a.Network, Limit: p.limits.Load().Del}, a.Config, func(ctx context.Context, cni gocni.CNI) error {
		remove := func() error { return recovered(func() error { return cni.Remove(ctx, a.ID, path, a.options()...) }) }
		// What ADD answered is in libcni's cache, where it reads it for DEL; an answer
		// that cannot be decoded is left out: a DEL needs none (CNI SPEC, "DEL").
		if err := remove(); !errors.Is(err, errAnswer) {
			return err
		}
		if err := os.Remove(cachePath(a.Network, a.ID)); err != nil {
			return err
		}
		return remove()
	})
}

func (p *plugins) check(ctx context.Context, a Attachment, path string) outcome {
	return p.call(ctx, runner.Request{Verb: "CHECK", ID: a.ID, Network: a.Network, Limit: p.limits.Load().Check}, a.Config, func(ctx context.Context, cni gocni.CNI) error {
		return cni.Check(ctx, a.ID, path, a.options()...)
	})
}

func (p *plugins) status(ctx context.Context, c *Configuration) outcome {
	return p.call(ctx, runner.Request{Verb: "STATUS", Network: c.Name, Limit: p.limits.Load().Status}, c.Bytes, func(_ context.Context, cni gocni.CNI) error {
		return cni.Status()
	})
}

// gc goes through libcni, because go-cni has no GC.
func (p *plugins) gc(ctx context.Context, c *Configuration, valid []types.GCAttachment) outcome {
	return p.run(ctx, runner.Request{Verb: "GC", Network: c.Name, Limit: p.limits.Load().GC}, func(ctx context.Context, run *runner.Run) error {
		list, err := libcni.NetworkConfFromBytes(c.Bytes)
		if err != nil {
			return err
		}
		cni := libcni.NewCNIConfigWithCacheDir(p.binDirs, p.gcCache, run)
		return cni.GCNetworkList(ctx, list, &libcni.GCArgs{ValidAttachments: valid})
	})
}

// call makes a run of what is called of go-cni, by an instance of its own, so that
// go-cni's lock couples nothing to anything.
func (p *plugins) call(ctx context.Context, request runner.Request, config []byte, do func(context.Context, gocni.CNI) error) outcome {
	request.Plugins = len(pluginTypes(config))
	return p.run(ctx, request, func(ctx context.Context, run *runner.Run) error {
		cni, err := gocni.New(gocni.WithMinNetworkCount(1), gocni.WithInterfacePrefix("eth"))
		if err == nil {
			err = throughExec(cni, libcni.NewCNIConfig(p.binDirs, run))
		}
		if err == nil {
			err = cni.Load(gocni.WithConfListBytes(config))
		}
		if err != nil {
			return fmt.Errorf("load the configuration: %w", err)
		}
		return do(ctx, cni)
	})
}

// throughExec has go-cni call plugins by a libcni with an Exec of ours. go-cni has no
// option for that: it makes the libcni of each instance itself, with an Exec that
// starts a plugin among the daemon's own processes (docs/workarounds.md).
func throughExec(cni gocni.CNI, calls libcni.CNI) error {
	field := reflect.Indirect(reflect.ValueOf(cni)).FieldByName("cniConfig")
	if !field.IsValid() || field.Type() != reflect.TypeFor[libcni.CNI]() {
		return errors.New("go-cni keeps its libcni elsewhere than this version of minicri knows: update minicri")
	}
	reflect.NewAt(field.Type(), field.Addr().UnsafePointer()).Elem().Set(reflect.ValueOf(calls))
	return nil
}
