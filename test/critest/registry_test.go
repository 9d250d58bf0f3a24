package critest

import (
	"cmp"
	"net/http"
	"runtime"
	"strings"
	"sync"
)

// registry serves images as distribution-spec has it, for pulls alone. It stands
// for several hosts, which the name of a repository begins with.
type registry struct {
	mu    sync.Mutex
	blobs map[string][]byte // by digest; manifests too
	types map[string]string // by digest: the media type
	tags  map[string]string // REPOSITORY:TAG -> digest
	asked []string          // that it did not have
}

func newRegistry() *registry {
	return &registry{blobs: map[string][]byte{}, types: map[string]string{}, tags: map[string]string{}}
}

// add names an image: HOST/REPOSITORY:TAG.
func (r *registry) add(name, digest string) { r.tags[name] = digest }

func (r *registry) put(mediaType string, data []byte) (descriptor object) {
	digest := digestOf(data)
	r.blobs[digest], r.types[digest] = data, mediaType
	return object{"mediaType": mediaType, "digest": digest, "size": len(data)}
}

// image adds an image for this machine and returns its digest.
func (r *registry) image(config object, layers ...[]byte) string {
	return r.manifest(config, runtime.GOARCH, layers...)["digest"].(string)
}

func (r *registry) manifest(config object, architecture string, layers ...[]byte) (descriptor object) {
	var digests []string
	var descriptors []object
	for _, layer := range layers {
		digests = append(digests, digestOf(layer))
		descriptors = append(descriptors, r.put(layerType, layer))
	}
	encoded := r.put(configType, encode(object{
		"architecture": architecture, "os": "linux", "config": config, "rootfs": object{"type": "layers", "diff_ids": digests},
	}))
	return r.put(manifestType, encode(object{"schemaVersion": 2, "mediaType": manifestType, "config": encoded, "layers": descriptors}))
}

// index adds an image for several architectures and returns its digest.
func (r *registry) index(config object, architectures []string, layers ...[]byte) string {
	var manifests []object
	for _, architecture := range architectures {
		descriptor := r.manifest(config, architecture, layers...)
		descriptor["platform"] = object{"architecture": architecture, "os": "linux"}
		manifests = append(manifests, descriptor)
	}
	return r.put(indexType, encode(object{"schemaVersion": 2, "mediaType": indexType, "manifests": manifests}))["digest"].(string)
}

// ServeHTTP answers /HOST/v2/REPOSITORY/{manifests,blobs}/REFERENCE.
func (r *registry) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	host, path, _ := strings.Cut(strings.TrimPrefix(request.URL.Path, "/"), "/v2/")
	if path == "" {
		return // the version check
	}
	reference := path[strings.LastIndex(path, "/")+1:]
	if repository, isManifest := strings.CutSuffix(path, "/manifests/"+reference); isManifest {
		reference = cmp.Or(r.tags[host+"/"+repository+":"+reference], reference)
	}
	data, ok := r.blobs[reference]
	if !ok {
		r.asked = append(r.asked, host+"/"+path)
		http.NotFound(w, request)
		return
	}
	w.Header().Set("Content-Type", r.types[reference])
	w.Header().Set("Docker-Content-Digest", reference)
	_, _ = w.Write(data)
}
