// Package registry is an image registry for attacks: it serves what it is given,
// however wrong, over HTTP, and lets a hook answer in its place. It keeps all in
// memory and checks nothing.
package registry

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Registry is an http.Handler. Its methods may be called while it serves.
type Registry struct {
	mu        sync.Mutex // guards what follows
	blobs     map[digest.Digest][]byte
	manifests map[string]manifest // by repository and tag or digest
	hook      Hook
}

type manifest struct {
	mediaType string
	data      []byte
}

// Hook answers a request in the registry's place, or returns false.
type Hook func(w http.ResponseWriter, r *http.Request) bool

// New is a registry without content.
func New() *Registry {
	return &Registry{blobs: map[digest.Digest][]byte{}, manifests: map[string]manifest{}}
}

// Answer sets the hook; nil is none.
func (r *Registry) Answer(hook Hook) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hook = hook
}

// Blob stores bytes and describes them.
func (r *Registry) Blob(mediaType string, data []byte) ocispec.Descriptor {
	r.mu.Lock()
	defer r.mu.Unlock()
	d := digest.FromBytes(data)
	r.blobs[d] = data
	return ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(data))}
}

// Manifest names a manifest or an index, repository:tag, and describes it.
func (r *Registry) Manifest(name, mediaType string, content any) ocispec.Descriptor {
	data, err := json.Marshal(content)
	if err != nil {
		panic(err) // a mistake in the test
	}
	repository, tag, _ := strings.Cut(name, ":")
	d := digest.FromBytes(data)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, reference := range []string{tag, d.String()} {
		r.manifests[repository+"/"+reference] = manifest{mediaType: mediaType, data: data}
	}
	return ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(data))}
}

// ServeHTTP answers what a pull asks for (distribution-spec, "Pull").
func (r *Registry) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	r.mu.Lock()
	hook := r.hook
	r.mu.Unlock()
	if hook != nil && hook(w, request) {
		return
	}
	path := strings.TrimPrefix(request.URL.Path, "/v2/")
	if repository, reference, found := strings.Cut(path, "/manifests/"); found {
		r.serveManifest(w, request, repository+"/"+reference)
		return
	}
	_, name, _ := strings.Cut(path, "/blobs/")
	r.mu.Lock()
	data, found := r.blobs[digest.Digest(name)]
	r.mu.Unlock()
	if !found {
		http.NotFound(w, request)
		return
	}
	http.ServeContent(w, request, "", time.Time{}, bytes.NewReader(data))
}

func (r *Registry) serveManifest(w http.ResponseWriter, request *http.Request, name string) {
	r.mu.Lock()
	found, ok := r.manifests[name]
	r.mu.Unlock()
	if !ok {
		http.NotFound(w, request)
		return
	}
	w.Header().Set("Content-Type", found.mediaType)
	w.Header().Set("Docker-Content-Digest", digest.FromBytes(found.data).String())
	http.ServeContent(w, request, "", time.Time{}, bytes.NewReader(found.data))
}
