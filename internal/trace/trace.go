// Package trace makes the spans of OpenTelemetry: one for each step, each run of
// a plugin and each blob of an image, below the span of the call that they are
// for. Without a call that is traced it does nothing, at the cost of one look at
// the context. It owns nothing and keeps no state; package otlp sends the spans.
package trace

import (
	"context"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/minicri/minicri/internal/redact"
)

// scope is the name of the instrumentation.
const scope = "github.com/minicri/minicri"

// Begin begins a span below that of the context; end ends it with the error of
// what it was for. Pairs are keys and values.
func Begin(ctx context.Context, name string, pairs ...string) (_ context.Context, end func(error)) {
	ctx, span := start(ctx, name, pairs)
	if span == nil {
		return ctx, func(error) {}
	}
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, redact.Text(err.Error()))
		}
		span.End()
	}
}

func start(ctx context.Context, name string, pairs []string, options ...trace.SpanStartOption) (context.Context, trace.Span) {
	parent := trace.SpanFromContext(ctx)
	if !parent.IsRecording() {
		return ctx, nil
	}
	attributes := inherited(parent)
	for i := 0; i+1 < len(pairs); i += 2 {
		attributes = append(attributes, attribute.String(pairs[i], redact.Text(pairs[i+1])))
	}
	return parent.TracerProvider().Tracer(scope).Start(ctx, name, append(options, trace.WithAttributes(attributes...))...)
}

// Past adds a span of something that is over, and returns the context for what
// happened within it. failure is why it failed, "" if it did not.
func Past(ctx context.Context, name string, began time.Time, took time.Duration, failure string, pairs ...string) context.Context {
	ctx, span := start(ctx, name, pairs, trace.WithTimestamp(began))
	if span == nil {
		return ctx
	}
	if failure != "" {
		span.SetStatus(codes.Error, redact.Text(failure))
	}
	span.End(trace.WithTimestamp(began.Add(took)))
	return trace.ContextWithSpan(ctx, recorded{span})
}

// recorded is a span that has ended and whose children are still to be made: it counts
// as recording.
type recorded struct{ trace.Span }

// IsRecording is of trace.Span.
func (recorded) IsRecording() bool { return true }

// inherited are the attributes that say which pod and container the parent is about.
func inherited(parent trace.Span) (list []attribute.KeyValue) {
	if past, ok := parent.(recorded); ok {
		parent = past.Span
	}
	if span, ok := parent.(interface{ Attributes() []attribute.KeyValue }); ok {
		for _, one := range span.Attributes() {
			if one.Key == "namespace" || one.Key == "pod" || one.Key == "container" {
				list = append(list, one)
			}
		}
	}
	return list
}

// Environment has TRACEPARENT and TRACESTATE for a program that is run in the
// context's span (W3C Trace Context, as environment variables by OpenTelemetry's
// specification); nothing without a span.
func Environment(ctx context.Context) (variables []string) {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return nil
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	for _, header := range []string{"traceparent", "tracestate"} {
		if value := carrier.Get(header); value != "" {
			variables = append(variables, strings.ToUpper(header)+"="+value)
		}
	}
	return variables
}
