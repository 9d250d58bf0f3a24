package stream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream/wsstream"
	utilexec "k8s.io/utils/exec"
)

// wantsV5 tells whether a client speaks v5.channel.k8s.io, the WebSocket
// protocol in which it can close its stdin. The library's server has all but
// that one.
func wantsV5(r *http.Request) bool {
	return wsstream.IsWebSocketRequestWithStreamCloseProtocol(r)
}

// serveV5 serves exec or attach. The numbers of the channels are those of v4:
// stdin, stdout, stderr, status, size.
func (s *session) serveV5(w http.ResponseWriter, o remotecommand.Options, run func(clientStreams) error) {
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{
		remotecommand.StreamProtocolV5Name: {Binary: true, Channels: channels(o)},
	})
	conn.SetIdleTimeout(s.server.options.Idle)
	_, streams, err := conn.Open(w, s.request)
	if err != nil {
		return // the client has been told
	}
	defer conn.Close()
	status := streams[remotecommand.StreamErr]
	if _, err := status.Write(nil); err != nil { // says that the connection is there
		return
	}
	sizes := make(chan remotecommand.TerminalSize)
	s.work.Go(func() { readSizes(s.request.Context(), streams[remotecommand.StreamResize], sizes) })
	err = run(asked(o, streams[remotecommand.StreamStdIn], streams[remotecommand.StreamStdOut], streams[remotecommand.StreamStdErr], sizes))
	_ = json.NewEncoder(status).Encode(statusOf(err)) // fails if the client is gone
}

func channels(o remotecommand.Options) []wsstream.ChannelType {
	list := []wsstream.ChannelType{
		wsstream.IgnoreChannel, wsstream.IgnoreChannel, wsstream.IgnoreChannel, wsstream.WriteChannel, wsstream.ReadChannel,
	}
	if o.Stdin {
		list[remotecommand.StreamStdIn] = wsstream.ReadChannel
	}
	if o.Stdout {
		list[remotecommand.StreamStdOut] = wsstream.WriteChannel
	}
	if o.Stderr {
		list[remotecommand.StreamStdErr] = wsstream.WriteChannel
	}
	return list
}

// readSizes decodes the sizes of the client's terminal.
func readSizes(ctx context.Context, from io.Reader, to chan<- remotecommand.TerminalSize) {
	defer close(to)
	decoder := json.NewDecoder(from)
	for {
		var size remotecommand.TerminalSize
		if decoder.Decode(&size) != nil {
			return
		}
		select {
		case to <- size:
		case <-ctx.Done():
			return
		}
	}
}

// status is what is left of Kubernetes' metav1.Status on the status channel.
type status struct {
	Status  string   `json:"status"`
	Message string   `json:"message,omitempty"`
	Reason  string   `json:"reason,omitempty"`
	Details *details `json:"details,omitempty"`
	Code    int      `json:"code,omitempty"`
}

type details struct {
	Causes []cause `json:"causes"`
}

type cause struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

func statusOf(err error) status {
	var exit utilexec.CodeExitError
	switch {
	case err == nil:
		return status{Status: "Success"}
	case errors.As(err, &exit):
		return status{
			Status: "Failure", Reason: remotecommand.NonZeroExitCodeReason,
			Message: fmt.Sprintf("command terminated with non-zero exit code: %v", err),
			Details: &details{Causes: []cause{{Reason: remotecommand.ExitCodeCauseType, Message: strconv.Itoa(exit.Code)}}},
		}
	default:
		return status{Status: "Failure", Reason: "InternalError", Message: err.Error(), Code: http.StatusInternalServerError}
	}
}
