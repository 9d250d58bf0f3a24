package stream

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/websocket"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The subprotocols of exec and attach over a WebSocket, and whether the last
// message is a status in JSON.
var webSocketProtocols = map[string]bool{
	"":                      false,
	"channel.k8s.io":        false,
	"base64.channel.k8s.io": false, "v2.channel.k8s.io": false, "v2.base64.channel.k8s.io": false,
	"v3.channel.k8s.io": false, "v3.base64.channel.k8s.io": false,
	"v4.channel.k8s.io": true, "v4.base64.channel.k8s.io": true,
	"v5.channel.k8s.io": true, "v5.base64.channel.k8s.io": true,
}

// rawExec runs a command over a WebSocket and gives what comes on each channel,
// and the channel of the first message.
func (p *pod) rawExec(protocol string, r *runtimeapi.ExecRequest, input string) (channels [5]bytes.Buffer, first int) {
	p.t.Helper()
	u := p.execURL(r)
	config, err := websocket.NewConfig("ws://"+u.Host+u.Path, "http://localhost")
	check(p.t, err)
	if protocol != "" {
		config.Protocol = []string{"unknown.k8s.io", protocol}
	}
	conn, err := config.DialContext(limited(p.t))
	check(p.t, err)
	defer conn.Close()
	check(p.t, conn.SetDeadline(time.Now().Add(patience)))
	encoded := strings.Contains(protocol, "base64")
	if input != "" && encoded {
		check(p.t, websocket.Message.Send(conn, "0"+base64.StdEncoding.EncodeToString([]byte(input))))
	} else if input != "" {
		check(p.t, websocket.Message.Send(conn, append([]byte{0}, input...)))
	}
	first = -1
	for {
		var message []byte
		err := websocket.Message.Receive(conn, &message)
		if errors.Is(err, io.EOF) {
			return channels, first
		}
		check(p.t, err)
		channel, data := int(message[0]), message[1:]
		if encoded {
			channel -= '0'
			data, err = base64.StdEncoding.AppendDecode(nil, data)
			check(p.t, err)
		}
		if first < 0 {
			if first = channel; len(data) != 0 {
				p.t.Errorf("%q: the first message is not empty: %q", protocol, data)
			}
		}
		channels[channel].Write(data)
	}
}

// A client may speak any version of the protocol of exec, with and without
// base64, or none. Before v4 it gets a failure as text, and nothing for success. One
// whose protocols are all unknown is refused.
//
// cri: ContainerConfig.metadata ContainerMetadata.name ExecResponse.url StartContainerRequest.container_id
func TestWebSocketProtocols(t *testing.T) {
	p := newPod(t, forever, nil)
	u := p.execURL(shell("true"))
	config, err := websocket.NewConfig("ws://"+u.Host+u.Path, "http://localhost")
	check(t, err)
	config.Protocol = []string{"v9.channel.k8s.io"}
	if conn, err := config.DialContext(limited(t)); err == nil {
		conn.Close()
		t.Error("v9 is served")
	}
	for protocol, inJSON := range webSocketProtocols {
		request := shell("head -c 5; echo >&2 error")
		request.Stdin = true
		channels, first := p.rawExec(protocol, request, "hello")
		if first != 1 || channels[1].String() != "hello" || channels[2].String() != "error\n" {
			t.Errorf("%q: first channel %d, stdout %q, stderr %q", protocol, first, &channels[1], &channels[2])
		}
		want := ""
		if inJSON {
			want = `{"status":"Success"}`
		}
		if got := channels[3].String(); got != want {
			t.Errorf("%q: success is told as %q, want %q", protocol, got, want)
		}
		failing := &runtimeapi.ExecRequest{Cmd: []string{"sh", "-c", "exit 7"}, Stderr: true}
		channels, first = p.rawExec(protocol, failing, "")
		if first != 2 {
			t.Errorf("%q: without stdout the first channel is %d", protocol, first)
		}
		text := channels[3].String()
		if inJSON {
			var status struct {
				Status, Message, Reason string
				Details                 struct {
					Causes []struct{ Reason, Message string }
				}
			}
			if err := json.Unmarshal([]byte(text), &status); err != nil || status.Reason != "NonZeroExitCode" || len(status.Details.Causes) != 1 || status.Details.Causes[0].Message != "7" {
				t.Errorf("%q: exit code 7 is told as %q", protocol, text)
			}
		} else if text != "command terminated with non-zero exit code: exit code 7" {
			t.Errorf("%q: exit code 7 is told as %q", protocol, text)
		}
	}
}

// A message of ten megabytes is taken in pieces, in order.
func TestLongWebSocketMessage(t *testing.T) {
	p := newPod(t, forever, nil)
	u := p.execURL(&runtimeapi.ExecRequest{Cmd: []string{"head", "-c", "10000007"}, Stdin: true, Stdout: true})
	config, err := websocket.NewConfig("ws://"+u.Host+u.Path, "http://localhost")
	check(t, err)
	config.Protocol = []string{"v5.channel.k8s.io"}
	conn, err := config.DialContext(limited(t))
	check(t, err)
	defer conn.Close()
	check(t, conn.SetDeadline(time.Now().Add(patience)))
	go func() {
		_ = websocket.Message.Send(conn, append([]byte{0}, make([]byte, 10_000_000)...)) // one frame
		_ = websocket.Message.Send(conn, append([]byte{0}, "the end"...))
	}()
	var out bytes.Buffer
	for {
		var message []byte
		if err := websocket.Message.Receive(conn, &message); err != nil {
			break
		}
		if message[0] == 1 {
			out.Write(message[1:])
		}
	}
	if out.Len() != 10_000_007 || !strings.HasSuffix(out.String(), "the end") {
		t.Errorf("%d bytes came back", out.Len())
	}
}
