package image

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/auth"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"

	"github.com/minicri/minicri/internal/redact"
)

// ErrRegistryUnavailable is the kind of an error of a registry that is unreachable, stopped
// answering or failed. It is an errdefs.ErrUnavailable.
var ErrRegistryUnavailable error = kindError{"registry unavailable", errdefs.ErrUnavailable}

// ErrVerification is the kind of an error of a verifier that refuses the image. It is an errdefs.ErrPermissionDenied.
var ErrVerification error = kindError{"image verification failed", errdefs.ErrPermissionDenied}

// errAbsent: no registry has the image. errPlatform: a registry has it for other platforms. errForeign: a layer is at
// an address that the image's author chose, which may be a service of the node's network.
var (
	errAbsent   error = kindError{"not found", errdefs.ErrNotFound}
	errPlatform error = kindError{"not for this platform", errdefs.ErrNotFound}
	errForeign  error = kindError{"absent from the registry; minicri uses no other address", errdefs.ErrNotFound}
)

type kindError struct {
	text string
	kind error
}

func (e kindError) Error() string { return e.text }
func (e kindError) Unwrap() error { return e.kind }

// registryError gives an error of a registry its kind and keeps the registry's words.
func registryError(ctx context.Context, err error, secrets *redact.Secrets) error {
	status, isStatus := errors.AsType[remoteerrors.ErrUnexpectedStatus](err)
	switch {
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		return context.Cause(ctx)
	case isStatus:
		return statusError(status, secrets)
	case isBadToken(err):
		return fmt.Errorf("the registry's token service returned no valid token: %w", errdefs.ErrUnauthenticated)
	case errors.Is(err, docker.ErrInvalidAuthorization), errors.Is(err, auth.ErrNoToken):
		return fmt.Errorf("%w: %w", err, errdefs.ErrUnauthenticated)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%w: %w", err, errdefs.ErrResourceExhausted)
	}
	_, stalled := errors.AsType[stalledError](err)
	_, connection := errors.AsType[*net.OpError](err) // not net.Error, which errors of the disk are too
	request, isRequest := errors.AsType[*url.Error](err)
	broken := stalled || connection || isRequest || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
	if broken && !errdefs.IsInvalidArgument(err) && !errdefs.IsPermissionDenied(err) {
		text := err.Error()
		if isRequest {
			text = strings.ReplaceAll(text, request.URL, withoutQuery(request.URL))
		}
		if refused, is := errors.AsType[*tls.CertificateVerificationError](err); is {
			return fmt.Errorf("%w: %w", ErrRegistryUnavailable, certificateError{text, refused})
		}
		return fmt.Errorf("%w: %s", ErrRegistryUnavailable, text)
	}
	return err
}

// certificateError is an error without the queries of addresses, of the kind of a refused certificate.
type certificateError struct {
	text string
	*tls.CertificateVerificationError
}

func (e certificateError) Error() string { return e.text }
func (e certificateError) Unwrap() error { return e.CertificateVerificationError }

// codeOf is what the registry answered: the library may have been given another code.
func codeOf(e remoteerrors.ErrUnexpectedStatus) int {
	number, _, _ := strings.Cut(e.Status, " ")
	if code, err := strconv.Atoi(number); err == nil {
		return code
	}
	return e.StatusCode
}

// statusError replaces the library's text, which has the signatures in an address's query
// and lacks answers that are not in the registry's error format.
func statusError(e remoteerrors.ErrUnexpectedStatus, secrets *redact.Secrets) error {
	code := codeOf(e)
	kind := cmp.Or[error](map[int]error{
		http.StatusUnauthorized: errdefs.ErrUnauthenticated, http.StatusForbidden: errdefs.ErrPermissionDenied,
		http.StatusNotFound: errdefs.ErrNotFound, http.StatusTooManyRequests: errdefs.ErrResourceExhausted,
	}[code], errdefs.ErrUnknown)
	if code >= 500 {
		kind = ErrRegistryUnavailable
	}
	return fmt.Errorf("%s %s: %s%s: %w", e.RequestMethod, withoutQuery(e.RequestURL), cut(secrets.Text(e.Status), 100), wordsOf(e.Body, secrets), kind)
}

const (
	maxWords = 300 // bytes of an answer in an error
	maxText  = 900 // bytes of a pull's error: with what callers add, an event of the pod, of 1 KiB
)

func cut(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return text[:most] + "..."
}

// answers is what a registry said of a manifest that it does not have.
type answers struct {
	mu    sync.Mutex
	words string
}

func (a *answers) note(words string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.words = cmp.Or(words, a.words)
}

func (a *answers) said() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.words
}

// pullError bounds an error's text, drops the control characters and the secrets in it, and ends with a cure.
type pullError struct {
	error
	ref     string
	cure    string // "" if the text says what to do
	secrets *redact.Secrets
}

func (e pullError) Error() string {
	cure := ""
	if e.cure != "" {
		cure = "; " + e.cure
	}
	text := strings.ReplaceAll(redact.Printable("pull "+e.ref+": "+e.secrets.Text(e.error.Error())), "\n", " ")
	return strings.ToValidUTF8(cut(text, maxText-len(cure)), "") + cure
}

func (e pullError) Unwrap() error { return e.error }

// cureOf returns the remedy for an error of a pull; known is the same error with its kind.
func (p *pulling) cureOf(err, known error) string {
	host := reference.Domain(p.ref)
	file := p.store.hostsFile(host)
	status, isStatus := errors.AsType[remoteerrors.ErrUnexpectedStatus](err)
	shown, _ := p.access.shown.Load().(string)
	switch {
	case isStatus && strings.Contains(string(status.Body), "HTTP request to an HTTPS server"):
		return fmt.Sprintf("the registry requires HTTPS: set %s in %s", p.access.entry("https", status.RequestURL), file)
	case isStatus && codeOf(status) == http.StatusTooManyRequests:
		return "the registry limits pulls: retry later, pull with credentials, or add a mirror to " + file
	case errdefs.IsUnauthorized(known) && shown == "":
		return fmt.Sprintf("the registry requires credentials, and the request has none for %s: name a secret in the pod's imagePullSecrets, or add the registry to images.docker_config", host)
	case errdefs.IsUnauthorized(known):
		return fmt.Sprintf("the registry refuses the credentials of %s: check user, password and expiry", shown)
	case errors.Is(known, ErrVerification):
		return ""
	case errdefs.IsPermissionDenied(known) && isStatus && shown == "":
		return "the registry refuses anonymous pulls of this image: provide credentials (imagePullSecrets, images.docker_config), or check its rules for this node's address"
	case errdefs.IsPermissionDenied(known) && isStatus:
		return fmt.Sprintf("the account of %s may not pull this image: check its rights in the registry", shown)
	case errors.Is(known, errAbsent) && shown == "" && p.access.request == (Auth{}):
		return "check name and tag; a private repository may require credentials (imagePullSecrets, images.docker_config)"
	case errors.Is(known, errAbsent):
		return "check name and tag, and whether the account can read this repository"
	case errdefs.IsDataLoss(known):
		return "the registry, a mirror or a proxy returned other bytes than the image names: push the image again, or clear the cache"
	case errdefs.IsResourceExhausted(known) && !isStatus:
		return fmt.Sprintf("free space on the filesystem of %s (crictl rmi --prune)", p.store.dir)
	case errors.Is(known, errForeign):
		return "push the image with its foreign layers (--allow-nondistributable-artifacts)"
	case errdefs.IsNotFound(known) && !errors.Is(known, errPlatform):
		return "the registry lacks a part of the image: push the image again"
	case errors.Is(known, ErrRegistryUnavailable):
		return p.connectionCure(err, host, file)
	}
	return ""
}

// entry is the line of hosts.toml for the host of an address: the registry, or one of its mirrors.
func (c *credentials) entry(scheme, address string) string {
	u, err := url.Parse(address)
	if err != nil {
		u = &url.URL{Host: c.registry}
	}
	if c.last.Load() != u.Host {
		return fmt.Sprintf("[host.%q]", scheme+"://"+u.Host)
	}
	return fmt.Sprintf("server = %q", scheme+"://"+u.Host)
}

// connectionCure returns the remedy for a registry that returned no answer.
func (p *pulling) connectionCure(err error, host, file string) string {
	address := "https://" + host
	if request, isRequest := errors.AsType[*url.Error](err); isRequest {
		address = request.URL
	}
	authority, isAuthority := errors.AsType[x509.UnknownAuthorityError](err)
	_, isHostname := errors.AsType[x509.HostnameError](err)
	invalid, isInvalid := errors.AsType[x509.CertificateInvalidError](err)
	_, isRecord := errors.AsType[tls.RecordHeaderError](err)
	name, isName := errors.AsType[*net.DNSError](err)
	operation, isOperation := errors.AsType[*net.OpError](err)
	_, isStatus := errors.AsType[remoteerrors.ErrUnexpectedStatus](err)
	switch {
	case isAuthority:
		issuer := "the CA"
		if authority.Cert != nil && authority.Cert.Issuer.String() != "" {
			issuer = fmt.Sprintf("%q", cut(redact.Line(authority.Cert.Issuer.String()), 100))
		}
		return fmt.Sprintf("this node does not trust the CA of the registry's certificate: set ca = \"/path/to/ca.pem\", with the certificate of %s, in %s", issuer, file)
	case isHostname:
		return "the registry's certificate is for other names: pull by one of them, or issue a certificate for " + host
	case isInvalid && invalid.Reason == x509.Expired:
		return "renew the registry's certificate, or correct this node's clock"
	case isInvalid:
		return "replace the registry's certificate"
	case isOperation && operation.Op == "remote error": // an alert of TLS
		return fmt.Sprintf("the registry refuses this node's TLS: if it requires a client certificate, set client = [[\"CERT\", \"KEY\"]] in %s", file)
	case isRecord || errors.Is(err, http.ErrSchemeMismatch):
		return fmt.Sprintf("the registry serves plain HTTP: set %s in %s", p.access.entry("http", address), file)
	case isOperation && operation.Op == "proxyconnect":
		return "the proxy does not answer: check HTTPS_PROXY and NO_PROXY in the daemon's environment"
	case isName:
		return fmt.Sprintf("check the name %s and this node's DNS (/etc/resolv.conf)", cut(redact.Line(name.Name), 100))
	case isStatus:
		return "the registry failed: retry later, or add a mirror to " + file
	}
	return fmt.Sprintf("check whether the registry answers from this node (address, firewall, HTTPS_PROXY of the daemon), or add a mirror to %s", file)
}

// isBadToken reports that a token service answered something else. The decoder's error
// quotes the answer, and the registry may have chosen any service of the node's network.
func isBadToken(err error) bool {
	_, syntax := errors.AsType[*json.SyntaxError](err)
	_, kind := errors.AsType[*json.UnmarshalTypeError](err)
	_, date := errors.AsType[*time.ParseError](err)
	return strings.Contains(err.Error(), "token response") && (syntax || kind || date)
}

func withoutQuery(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return "registry"
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}
