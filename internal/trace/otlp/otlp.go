// Package otlp sends the spans of package trace to a collector, by OTLP over gRPC
// or HTTP. A daemon that has no endpoint configured never calls it. It owns the
// exporter and its queue; spans that a collector does not take are dropped, and
// nothing waits for it but Close.
package otlp

import (
	"context"
	"fmt"
	"os"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	"go.opentelemetry.io/otel/sdk/trace"
	"google.golang.org/grpc/stats"
)

// Options say where spans go.
type Options struct {
	// Endpoint is HOST:PORT of the collector.
	Endpoint string
	// HTTP is OTLP over HTTP instead of gRPC, Insecure without TLS.
	HTTP, Insecure bool
	// PerMillion is how many of a million calls are traced that come without a
	// decision of their caller; that of the kubelet is kept.
	PerMillion int
	// Version is minicri's.
	Version string
}

// Exporter sends spans.
type Exporter struct{ provider *trace.TracerProvider }

// Open makes an exporter, nil without an endpoint. It connects in the background. The
// name of the node is that of the host, unless its kubelet was given another.
func Open(ctx context.Context, o Options) (*Exporter, error) {
	if o.Endpoint == "" {
		return nil, nil
	}
	exporter, err := otlptrace.New(ctx, client(o))
	if err != nil {
		return nil, fmt.Errorf("send traces to %s (tracing.endpoint): %w", o.Endpoint, err)
	}
	host, _ := os.Hostname() // then it has no name
	return &Exporter{trace.NewTracerProvider(
		trace.WithBatcher(exporter, trace.WithBatchTimeout(batchTime)),
		trace.WithSampler(trace.ParentBased(trace.TraceIDRatioBased(float64(o.PerMillion)/1e6))),
		trace.WithResource(resource.NewSchemaless(attribute.String("service.name", "minicri"), attribute.String("service.version", o.Version),
			attribute.String("host.name", host), attribute.String("k8s.node.name", host))),
	)}, nil
}

const (
	// batchTime is how long spans wait for others to be sent with.
	batchTime = time.Second
	// sendTime is how long a collector may take for a batch.
	sendTime = 5 * time.Second
)

func client(o Options) otlptrace.Client {
	if o.HTTP {
		options := []otlptracehttp.Option{otlptracehttp.WithEndpoint(o.Endpoint), otlptracehttp.WithTimeout(sendTime)}
		if o.Insecure {
			options = append(options, otlptracehttp.WithInsecure())
		}
		return otlptracehttp.NewClient(options...)
	}
	options := []otlptracegrpc.Option{otlptracegrpc.WithEndpoint(o.Endpoint), otlptracegrpc.WithTimeout(sendTime)}
	if o.Insecure {
		options = append(options, otlptracegrpc.WithInsecure())
	}
	return otlptracegrpc.NewClient(options...)
}

// Calls makes a span of each call, below that of its caller. It is nil without a
// collector: then no call costs anything.
func (e *Exporter) Calls() stats.Handler {
	if e == nil {
		return nil
	}
	return otelgrpc.NewServerHandler(otelgrpc.WithTracerProvider(e.provider), otelgrpc.WithPropagators(propagation.TraceContext{}))
}

// Close sends what is left, for no longer than the context.
func (e *Exporter) Close(ctx context.Context) error {
	if e == nil {
		return nil
	}
	if err := e.provider.Shutdown(ctx); err != nil {
		return fmt.Errorf("send the last traces: %w", err)
	}
	return nil
}
