package stream

import (
	"context"
	"encoding/json"
	"io"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
)

// input is a sink that is read. It holds nothing: what is not read holds
// up its connection.
type input struct {
	reader *io.PipeReader
	writer *io.PipeWriter
}

// newInput makes an input that ends with the session.
func (s *session) newInput() *input {
	reader, writer := io.Pipe()
	context.AfterFunc(s.request.Context(), func() { _ = reader.CloseWithError(s.request.Context().Err()) })
	return &input{reader: reader, writer: writer}
}

// Write implements sink.
func (i *input) Write(p []byte) (int, error) { return i.writer.Write(p) }

// CloseWrite implements sink.
func (i *input) CloseWrite() { _ = i.writer.Close() }

// Abort implements sink.
func (i *input) Abort() { _ = i.writer.Close() }

// largestSize is much longer than a size in JSON.
const largestSize = 1 << 10

// sizes are those of the client's terminal, until the connection ends.
func (s *session) sizes(from io.Reader) <-chan remotecommand.TerminalSize {
	sizes := make(chan remotecommand.TerminalSize)
	s.work.Go(func() {
		defer close(sizes)
		limited := &io.LimitedReader{R: from}
		decoder := json.NewDecoder(limited)
		for {
			var size remotecommand.TerminalSize
			limited.N = largestSize // the decoder would hold a value of any length
			if decoder.Decode(&size) != nil {
				_, _ = io.Copy(io.Discard, from) // what is no size must not hold up the rest
				return
			}
			select {
			case sizes <- size:
			case <-s.request.Context().Done():
				return
			}
		}
	})
	return sizes
}
