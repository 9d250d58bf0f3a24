package main

import (
	"context"
	"log/slog"
	"time"

	"google.golang.org/grpc/stats"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/trace/otlp"
)

// traces send spans to a collector, if one is configured.
type traces struct{ exporter *otlp.Exporter }

func openTraces(ctx context.Context, c *config.Config) (traces, error) {
	t := c.Tracing
	if t.Endpoint == "" {
		return traces{}, nil
	}
	exporter, err := otlp.Open(ctx, otlp.Options{
		Endpoint: t.Endpoint, HTTP: t.Protocol == "http", Insecure: t.Insecure, PerMillion: t.PerMillion, Version: version,
	})
	return traces{exporter}, err
}

// calls is nil without a collector: then no call costs anything.
func (t traces) calls() stats.Handler {
	if t.exporter == nil {
		return nil
	}
	return t.exporter.Calls()
}

// lastSpans is how long the last spans may take, when the daemon ends.
const lastSpans = time.Second

func (t traces) close(logger *slog.Logger) {
	if t.exporter == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), lastSpans)
	defer cancel()
	if err := t.exporter.Close(ctx); err != nil {
		logger.Warn("some traces are lost", "err", err)
	}
}
