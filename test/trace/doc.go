// Package trace tests the traces that a daemon sends, against servers of OTLP:
// the collector's own service definitions, over gRPC and over HTTP.
package trace
