// Package otlp sends the spans of package trace to a collector, by OTLP over gRPC or HTTP. It owns the
// exporter and its queue. It drops spans that the collector does not take; only Close waits for it.
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
	Endpoint       string // HOST:PORT of the collector
	HTTP, Insecure bool   // over HTTP instead of gRPC, without TLS
	PerMillion     int    // calls traced of a million whose caller, such as the kubelet, has not decided
	Version        string
}

// Exporter sends spans.
type Exporter struct{ provider *trace.TracerProvider }

// Open returns nil without an endpoint. It connects in the background. The node gets the name of the host.
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
	batchTime = time.Second     // how long spans are collected before they are sent
	sendTime  = 5 * time.Second // how long a collector may take for them
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

// Calls makes a span of each call, below that of its caller; nil without a collector.
func (e *Exporter) Calls() stats.Handler {
	if e == nil {
		return nil
	}
	return otelgrpc.NewServerHandler(otelgrpc.WithTracerProvider(e.provider), otelgrpc.WithPropagators(propagation.TraceContext{}))
}

// Close sends what is left, until the context ends.
func (e *Exporter) Close(ctx context.Context) error {
	if e == nil {
		return nil
	}
	if err := e.provider.Shutdown(ctx); err != nil {
		return fmt.Errorf("send the last traces: %w", err)
	}
	return nil
}
