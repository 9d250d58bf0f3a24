package stream

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"time"
)

// TLS is how sessions are secured: not at all when it is zero.
type TLS struct {
	// Cert and Key are PEM files, read anew for each connection, so that they
	// can be replaced.
	Cert, Key string
	// SelfSigned makes a certificate that lasts as long as the daemon.
	SelfSigned bool
}

// selfSignedLife is more than a daemon runs.
const selfSignedLife = 10 * 365 * 24 * time.Hour

// config is nil without TLS. What cannot be used is an error now.
func (t TLS) config(host string) (*tls.Config, error) {
	if t.SelfSigned {
		certificate, err := selfSign(host)
		if err != nil {
			return nil, fmt.Errorf("make a certificate: %w", err)
		}
		return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{*certificate}}, nil
	}
	if t.Cert == "" {
		return nil, nil
	}
	load := func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		certificate, err := tls.LoadX509KeyPair(t.Cert, t.Key)
		if err != nil {
			return nil, fmt.Errorf("the certificate for exec, attach and port-forward (streaming.tls_cert, tls_key): %w", err)
		}
		return &certificate, nil
	}
	if _, err := load(nil); err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: load}, nil
}

func selfSign(host string) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "minicri"},
		NotBefore:    time.Now().Add(-time.Hour), // clocks differ
		NotAfter:     time.Now().Add(selfSignedLife),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses:  []net.IP{net.ParseIP(host)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
