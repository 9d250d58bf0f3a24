package stream

import (
	"fmt"
	"net"
	"net/http"
	"strings"

	"k8s.io/streaming/pkg/httpstream"
	httpspdy "k8s.io/streaming/pkg/httpstream/spdy"

	"github.com/minicri/minicri/stream/spdy"
)

// upgradeSPDY makes the HTTP connection one of SPDY, with the first of the
// client's subprotocols that is served. A client that is refused has got its answer.
func (s *session) upgradeSPDY(u *upgrade, protocols ...string) (net.Conn, string, error) {
	r := s.request
	if !httpstream.IsUpgradeRequest(r) || !strings.EqualFold(r.Header.Get(httpstream.HeaderUpgrade), httpspdy.HeaderSpdy31) {
		http.Error(u, "upgrade to SPDY/3.1, or to a WebSocket", http.StatusBadRequest)
		return nil, "", fmt.Errorf("upgrade to %q is not served", r.Header.Get(httpstream.HeaderUpgrade))
	}
	protocol, err := httpstream.Handshake(r, u, protocols)
	if err != nil {
		return nil, "", err
	}
	u.Header().Set(httpstream.HeaderConnection, httpstream.HeaderUpgrade)
	u.Header().Set(httpstream.HeaderUpgrade, httpspdy.HeaderSpdy31)
	u.WriteHeader(http.StatusSwitchingProtocols)
	conn, _, err := u.Hijack()
	return conn, protocol, err
}

// serveSPDY reads a connection to its end, as work of the session. The channel
// is closed then.
func (s *session) serveSPDY(conn *spdy.Conn) <-chan struct{} {
	served := make(chan struct{})
	s.work.Go(func() {
		defer close(served)
		s.report("a client breaks the protocol", conn.Serve())
		s.gone()
	})
	return served
}
