package image

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/minicri/minicri/internal/redact"
)

const (
	firstPause = 50 * time.Millisecond  // before a request is repeated; each next one is twice as long
	lastPause  = 400 * time.Millisecond // then the failure counts
	maxPause   = 10 * time.Second       // a longer Retry-After fails the pull
	final      = 599                    // in place of a code that the library would repeat at once
)

// failedForNow reports the codes that a registry gives for a moment.
func failedForNow(code int) bool {
	switch code {
	case http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusBadGateway,
		http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// repeat reports whether to repeat a request, and after which time. A mirror's failure has the next host asked instead.
func (l link) repeat(req *http.Request, resp *http.Response, pause time.Duration) (time.Duration, bool) {
	host := firstOf(req).URL.Host
	others := l.pull.isOwn(host) && l.pull.last.Load() != host
	if !failedForNow(resp.StatusCode) || req.Method != http.MethodGet || others || pause > lastPause {
		return 0, false
	}
	asked, isAsked := retryAfter(resp.Header)
	if isAsked {
		pause = asked
	}
	return pause, pause <= maxPause
}

// retryAfter reads the header of that name, seconds or a date (RFC 9110, 10.2.3).
func retryAfter(header http.Header) (time.Duration, bool) {
	text := header.Get("Retry-After")
	if seconds, err := strconv.ParseUint(text, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second, true
	}
	date, err := http.ParseTime(text)
	return max(time.Until(date), 0).Round(time.Second), err == nil
}

// adapt turns answers of registries into answers that the library understands:
//   - Any failure of HEAD for a manifest, and a HEAD that lacks type, digest or size, is "method not allowed", after
//     which the library sends GET. Registries, and the storage that they redirect to, may support GET alone.
//   - A manifest gets the type that its content has, if the header has a general one, and a digest.
//   - A failed login by POST is "not found", after which the library sends GET with the same user and password.
//   - A failure that was repeated already has a code that the library does not repeat.
//
// The status text stays the registry's.
func (l link) adapt(req *http.Request, resp *http.Response) (*http.Response, error) {
	first := firstOf(req)
	isManifest := strings.Contains(first.URL.Path, "/manifests/")
	l.pull.hideAddress(resp.Location())
	if resp.StatusCode >= 300 && resp.StatusCode < 400 {
		return resp, nil
	}
	if resp.StatusCode >= http.StatusBadRequest && isManifest {
		readAgain(resp)
	}
	good := resp.StatusCode == http.StatusOK
	switch {
	case first.Method == http.MethodPost && isPassword(first):
		return withToken(resp)
	case req.Method == http.MethodHead && isManifest && !wantsLogin(req, resp) && !(good && describesManifest(resp)):
		resp.StatusCode = http.StatusMethodNotAllowed
	case req.Method == http.MethodGet && isManifest && good && req.Header.Get("Accept-Encoding") == "": // not by digest
		return describeManifest(resp)
	case resp.StatusCode == http.StatusNotFound && isManifest && l.pull.isOwn(first.URL.Host):
		l.pull.answers.note(wordsOf(readAgain(resp), l.pull.secrets))
	case failedForNow(resp.StatusCode):
		if asked := resp.Header.Get("Retry-After"); asked != "" {
			wait, _ := retryAfter(resp.Header)
			resp.Status += fmt.Sprintf(" (Retry-After: %s)", wait)
		}
		resp.StatusCode = final
	}
	return resp, nil
}

// noHead is the answer in place of a connection that ended at HEAD.
func noHead(req *http.Request) *http.Response {
	return &http.Response{
		Status: "405 Method Not Allowed", StatusCode: http.StatusMethodNotAllowed,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{}, Body: http.NoBody, Request: req,
	}
}

const leastSignature = 16 // bytes of a value in an address, for it to be one

// hideAddress hides the secrets of an address that a registry redirects to: a login, a signature.
func (c *credentials) hideAddress(to *url.URL, err error) {
	if err != nil { // there is none
		return
	}
	password, _ := to.User.Password()
	c.secrets.AddLogin(to.User.Username(), password)
	for _, values := range to.Query() {
		for _, value := range values {
			if len(value) >= leastSignature {
				c.secrets.Add(value)
			}
		}
	}
}

// wantsLogin reports an answer that the authorizer serves.
func wantsLogin(req *http.Request, resp *http.Response) bool {
	return resp.StatusCode == http.StatusUnauthorized && req.Header.Get("Authorization") == "" &&
		resp.Header.Get("WWW-Authenticate") != ""
}

func describesManifest(resp *http.Response) bool {
	kind, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
	return (images.IsManifestType(kind) || images.IsIndexType(kind)) && resp.ContentLength >= 0 &&
		digest.Digest(resp.Header.Get("Docker-Content-Digest")).Validate() == nil
}

// isDocument reports whether a type names a kind of document, and not a form such as JSON.
func isDocument(contentType string) bool {
	kind, _, _ := strings.Cut(contentType, ";")
	return images.IsManifestType(kind) || images.IsIndexType(kind) || strings.HasPrefix(kind, "application/vnd.")
}

// describeManifest gives an answer the header fields that a registry may leave out.
func describeManifest(resp *http.Response) (*http.Response, error) {
	data, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return nil, err
	}
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(data)), int64(len(data))
	if kind := resp.Header.Get("Content-Type"); !isDocument(kind) {
		resp.Header.Set("Content-Type", typeOf(data, kind))
	}
	if digest.Digest(resp.Header.Get("Docker-Content-Digest")).Validate() != nil {
		resp.Header.Set("Docker-Content-Digest", digest.FromBytes(data).String())
	}
	return resp, nil
}

// typeOf returns the type of a manifest or an index by its content, and the type in the header of anything else.
func typeOf(data []byte, said string) string {
	var document struct {
		MediaType                           string
		Manifests, Config, Layers, FSLayers json.RawMessage
	}
	switch err := json.Unmarshal(data, &document); {
	case err != nil:
		return said
	case images.IsManifestType(document.MediaType) || images.IsIndexType(document.MediaType):
		return document.MediaType
	case document.FSLayers != nil:
		return images.MediaTypeDockerSchema1Manifest
	case document.MediaType == "" && document.Manifests != nil:
		return ocispec.MediaTypeImageIndex
	case document.MediaType == "" && document.Config != nil && document.Layers != nil:
		return ocispec.MediaTypeImageManifest
	}
	return said
}

// isPassword reports a login by user and password. A refresh token is known to POST alone.
func isPassword(post *http.Request) bool {
	if post.GetBody == nil {
		return false
	}
	body, err := post.GetBody()
	if err != nil {
		return false
	}
	form, err := io.ReadAll(body)
	values, _ := url.ParseQuery(string(form))
	return err == nil && values.Get("grant_type") == "password"
}

// withToken has the library go on to GET after an answer without a token.
func withToken(resp *http.Response) (*http.Response, error) {
	var answer struct {
		Token string `json:"access_token"`
	}
	if resp.StatusCode == http.StatusOK && json.Unmarshal(readAgain(resp), &answer) == nil && answer.Token != "" {
		return resp, nil
	}
	resp.StatusCode = http.StatusNotFound
	return resp, nil
}

// readAgain returns the body of an answer. The body stays readable, also after the library has closed it.
func readAgain(resp *http.Response) []byte {
	data, _ := io.ReadAll(io.LimitReader(resp.Body, maxManifest)) // a failure may be cut short
	_ = resp.Body.Close()
	resp.Body = io.NopCloser(bytes.NewReader(data))
	return data
}

// wordsOf returns a colon and the text of a failed answer, or nothing.
func wordsOf(body []byte, secrets *redact.Secrets) string {
	var registry docker.Errors
	words := strings.Join(strings.Fields(string(body)), " ")
	if err := registry.UnmarshalJSON(body); err == nil && registry.Len() > 0 {
		words = registry.Error()
	}
	if words == "" {
		return ""
	}
	return ": " + cut(secrets.Text(words), maxWords)
}
