package nodetest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/leak"
)

// WantCode fails the test, which goes on, unless the error has the gRPC code, and says all this.
func WantCode(t testing.TB, err error, code codes.Code, says ...string) {
	t.Helper()
	harness.Want(t, status.Code(err) == code, "want code %v, got: %.2000v", code, err)
	if code != codes.OK {
		harness.WantError(t, err, says...)
	}
}

// Call calls an RPC that has to succeed.
func Call[Request, Answer any](
	t testing.TB, rpc func(context.Context, Request, ...grpc.CallOption) (Answer, error), request Request,
) Answer {
	t.Helper()
	answer, err := rpc(harness.Limited(t), request)
	harness.Check(t, err)
	return answer
}

// Err is the error of an RPC.
func Err[Request, Answer any](
	t testing.TB, rpc func(context.Context, Request, ...grpc.CallOption) (Answer, error), request Request,
) error {
	_, err := rpc(harness.Limited(t), request)
	return err
}

// Info decodes one key of the verbose Status; a list is in an object there.
func Info[T any](t testing.TB, n *Node, key string) (value T) {
	t.Helper()
	said := []byte(Call(t, n.Runtime.Status, &runtimeapi.StatusRequest{Verbose: true}).Info[key])
	var list struct{ Items json.RawMessage }
	if json.Unmarshal(said, &list) == nil && list.Items != nil {
		said = list.Items
	}
	if len(said) > 0 {
		harness.Check(t, json.Unmarshal(said, &value))
	}
	return value
}

// Main runs the tests of a package and then looks, once for all, for what [Parallel] tests cannot tell apart:
// namespaces and processes. It returns the exit code for os.Exit.
func Main(m *testing.M) int {
	scope := leak.Scope{Namespaces: []string{"net", "user"}, Executables: executables}
	before, err := leak.Take(context.Background(), scope)
	if err != nil {
		fmt.Fprintln(os.Stderr, "harness:", err)
		return 1
	}
	code := m.Run()
	ctx, cancel := context.WithTimeout(context.Background(), settleTime)
	defer cancel()
	leaks, err := leak.Settle(ctx, before, scope)
	for _, l := range leaks {
		fmt.Fprintln(os.Stderr, "harness: left behind by all tests together:", l)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "harness:", err)
	}
	if len(leaks) > 0 || err != nil {
		return 1
	}
	return code
}

// Certificate makes one for 127.0.0.1 that is its own authority and lasts so long, and its key.
func Certificate(t testing.TB, cert, key string, lasts time.Duration) (authority []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	harness.Check(t, err)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<60))
	harness.Check(t, err)
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "node " + serial.String()},
		IsCA: true, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(lasts),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	harness.Check(t, err)
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	harness.Check(t, err)
	authority = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	secret = pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})
	harness.Check(t, errors.Join(os.WriteFile(cert, authority, 0o600), os.WriteFile(key, secret, 0o600)))
	return authority
}
