// Package trace makes the spans of OpenTelemetry: one for each step, plugin run and blob of an image. If the call is
// not traced, it looks at the context and does nothing. It keeps no state. Package otlp sends the spans.
package trace

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/minicri/minicri/internal/redact"
)

// Begin begins a span below that of the context. end ends it with an error. Pairs are keys and values.
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
	return parent.TracerProvider().Tracer("github.com/minicri/minicri").Start(ctx, name, append(options, trace.WithAttributes(attributes...))...)
}

// Note says of the context's span, and so of those below it, what they are about. Pairs are keys and values.
func Note(ctx context.Context, pairs ...any) {
	span := trace.SpanFromContext(ctx)
	if !span.IsRecording() {
		return
	}
	for i := 0; i+1 < len(pairs); i += 2 {
		span.SetAttributes(attribute.String(fmt.Sprint(pairs[i]), fmt.Sprint(pairs[i+1])))
	}
}

// Past adds a span of something that is over.
func Past(ctx context.Context, name string, began time.Time, took time.Duration, failure string, pairs ...string) {
	_, span := start(ctx, name, pairs, trace.WithTimestamp(began))
	if span == nil {
		return
	}
	if failure != "" {
		span.SetStatus(codes.Error, redact.Text(failure))
	}
	span.End(trace.WithTimestamp(began.Add(took)))
}

var names = []attribute.Key{"namespace", "pod", "sandbox", "handler", "container", "image"}

// inherited are the parent's attributes that say which pod and container it is about.
func inherited(parent trace.Span) (list []attribute.KeyValue) {
	if span, ok := parent.(interface{ Attributes() []attribute.KeyValue }); ok {
		for _, one := range span.Attributes() {
			if slices.Contains(names, one.Key) {
				list = append(list, one)
			}
		}
	}
	return list
}

// Environment has the context's TRACEPARENT and TRACESTATE (W3C Trace Context, OpenTelemetry's specification).
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
