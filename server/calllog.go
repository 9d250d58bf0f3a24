package server

import (
	"context"
	"fmt"
	"log/slog"
	"path"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// milestones maps calls that are logged at the level info to the text of the line. The
// kubelet probes by ExecSync: only Exec and Attach are a user's.
var milestones = map[string]string{
	"RunPodSandbox": "pod made", "RemovePodSandbox": "pod removed", "StartContainer": "container started",
	"Exec": "exec", "Attach": "attach", "PullImage": "image pulled",
}

// about says which pod, container and image a request is about, as pairs of the log.
func (c calls) about(request any) (pairs []any) {
	add := func(key, value string) {
		if value != "" {
			pairs = append(pairs, key, value)
		}
	}
	pod := func(config *runtimeapi.PodSandboxConfig) { // of one that is not made yet
		add("namespace", config.GetMetadata().GetNamespace())
		add("pod", config.GetMetadata().GetName())
	}
	sandbox := func(id string) {
		if c.runtime != nil && id != "" {
			if sb, err := c.runtime.Sandboxes.Find(id); err == nil {
				pairs = append(pairs, sb.Names()...)
				return
			}
		}
		add("sandbox", id)
	}
	if r, ok := request.(interface{ GetPodSandboxId() string }); ok {
		sandbox(r.GetPodSandboxId())
	}
	if r, ok := request.(interface{ GetContainerId() string }); ok && r.GetContainerId() != "" {
		if c.runtime != nil {
			if found, err := c.runtime.Containers.Find(r.GetContainerId()); err == nil {
				sandbox(found.SandboxID)
				add("container", found.Config().GetMetadata().GetName())
				add("image", found.Config().GetImage().GetImage())
			}
		}
		add("id", r.GetContainerId())
	}
	if r, ok := request.(interface{ GetImage() *runtimeapi.ImageSpec }); ok {
		add("image", r.GetImage().GetImage())
		add("handler", r.GetImage().GetRuntimeHandler())
	}
	switch r := request.(type) {
	case *runtimeapi.RunPodSandboxRequest:
		pod(r.GetConfig())
		add("handler", r.GetRuntimeHandler())
	case *runtimeapi.CreateContainerRequest:
		add("container", r.GetConfig().GetMetadata().GetName())
		add("image", r.GetConfig().GetImage().GetImage())
	case *runtimeapi.PullImageRequest:
		pod(r.GetSandboxConfig())
	}
	return pairs
}

// made are the ids that an answer brings, and the size of an image.
func (c calls) made(response any) (pairs []any) {
	switch r := response.(type) {
	case *runtimeapi.RunPodSandboxResponse:
		return []any{"sandbox", r.GetPodSandboxId()}
	case *runtimeapi.CreateContainerResponse:
		return []any{"id", r.GetContainerId()}
	case *runtimeapi.PullImageResponse:
		pairs = []any{"id", r.GetImageRef()}
		if c.images == nil {
			return pairs
		}
		if pulled, err := c.images.Get(r.GetImageRef()); err == nil {
			pairs = append(pairs, "size", pulled.Size)
		}
		return pairs
	}
	return nil
}

// log writes the line of a call. A failure of a call that changes something is an error
// whatever its code, but for probes; that something is not there is what a kubelet often asks to hear.
func (c calls) log(ctx context.Context, method string, pairs []any, began time.Time, err error) {
	name := path.Base(method)
	level, text := slog.LevelDebug, "call"
	switch {
	case err != nil && name != "ExecSync" && (slices.Contains(changing, name) || milestones[name] != ""):
		level, text = slog.LevelError, "call failed"
	case err != nil && status.Code(err) != codes.NotFound:
		level, text = slog.LevelWarn, "call failed"
	case err == nil && milestones[name] != "":
		level, text = slog.LevelInfo, milestones[name]
	}
	c.logger.Log(ctx, level, text, append(append([]any{"method", name}, pairs...), "took", time.Since(began), "err", err)...)
}

// note adds the same to the span of the call.
func note(ctx context.Context, pairs []any) {
	span := trace.SpanFromContext(ctx)
	if !span.IsRecording() {
		return
	}
	for i := 0; i+1 < len(pairs); i += 2 {
		span.SetAttributes(attribute.String(pairs[i].(string), fmt.Sprint(pairs[i+1])))
	}
}
