package stream

import (
	"encoding/binary"
	"io"
	"sync"

	"k8s.io/streaming/pkg/httpstream/wsstream"
)

// serveChannels forwards over a WebSocket with two channels for each port, one
// for data and one for an error, that begin with the port's number. Each port
// has one connection, of which no side can close its half alone.
func (f *forwarder) serveChannels(u *upgrade, ports []int32) {
	var types []wsstream.ChannelType
	for range ports {
		types = append(types, wsstream.ReadWriteChannel, wsstream.WriteChannel)
	}
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{
		"": {Binary: true, Channels: types},
		"v4." + wsstream.ChannelWebSocketProtocol:       {Binary: true, Channels: types},
		"v4." + wsstream.Base64ChannelWebSocketProtocol: {Channels: types},
	})
	_, channels, err := conn.Open(u, f.session.request)
	if err != nil {
		return // the client has been told
	}
	defer conn.Close()
	var open sync.WaitGroup
	for i, port := range ports {
		open.Go(func() { f.connectChannel(port, channel{channels[2*i]}, channels[2*i+1]) })
	}
	open.Wait()
}

// connectChannel makes the connection of a port, and says why if it cannot.
func (f *forwarder) connectChannel(port int32, data channel, errors io.WriteCloser) {
	defer data.Close()
	number := binary.LittleEndian.AppendUint16(nil, uint16(port))
	for _, to := range []io.Writer{data, errors} {
		if _, err := to.Write(number); err != nil {
			return
		}
	}
	if err := f.forward(port, data); err != nil {
		tell(errors, err)
	}
}

// channel is one of a WebSocket's. To close it ends both directions.
type channel struct{ io.ReadWriteCloser }

// Reset implements client.
func (c channel) Reset() error { return c.Close() }

// IsFinished implements client: who reads learns it.
func (c channel) IsFinished() bool { return false }
