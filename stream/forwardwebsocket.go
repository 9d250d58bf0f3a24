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
	if len(ports) > maxForwards {
		ports = ports[:maxForwards] // a byte is the number of a channel
	}
	sinks := make([]sink, 2*len(ports))
	pods := make([]*podConn, len(ports))
	for i := range ports {
		pods[i] = newPodConn()
		sinks[2*i] = pods[i]
	}
	c, err := f.session.openChannels(u, map[string]channelProtocol{
		"": {},
		"v4." + wsstream.ChannelWebSocketProtocol:       {},
		"v4." + wsstream.Base64ChannelWebSocketProtocol: {base64: true},
	}, sinks)
	if err != nil {
		return // the client has its answer
	}
	defer c.close()
	var open sync.WaitGroup
	for i, port := range ports {
		open.Go(func() { f.connectChannel(port, pods[i], c.writer(byte(2*i)), c.writer(byte(2*i+1))) })
	}
	open.Wait()
}

// connectChannel makes the connection of a port, and says why if it cannot.
func (f *forwarder) connectChannel(port int32, pod *podConn, data, errors io.WriteCloser) {
	number := binary.LittleEndian.AppendUint16(nil, uint16(port))
	for _, to := range []io.Writer{data, errors} {
		if _, err := to.Write(number); err != nil {
			return
		}
	}
	if err := f.connect(port, channelClient{data, pod}, pod); err != nil {
		writeError(errors, err)
	}
}

// channelClient is a client's end of a connection over channels. A channel
// cannot be closed alone, so to close one direction ends both.
type channelClient struct {
	io.Writer
	pod *podConn
}

// Close implements client.
func (c channelClient) Close() error {
	c.pod.Abort()
	return nil
}

// Reset implements client.
func (c channelClient) Reset() { c.pod.Abort() }
