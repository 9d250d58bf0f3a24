package image

import (
	"bytes"
	"context"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// handmade is the manifest of an image of one layer, for a test to spoil.
func (r *testRegistry) handmade(t testing.TB) ocispec.Manifest {
	return r.Image(ocispec.ImageConfig{}, tarOf(t, file("a", "1")))
}

// attack: images: a manifest has encrypted, unknown or too many layers, sha512, bad digests or sizes, a configuration of 17 MiB, or is an artifact
// held: it is refused with that reason before any layer is fetched; a malformed digest is never part of a request
// field: containerd never mounts artifacts, unpacks encrypted bytes as a layer, and requests /v2/etc/passwd
func TestManifestsThatAreRefusedBeforeTheDownload(t *testing.T) {
	sum := sha512.Sum512([]byte("x"))
	reference := "127.0.0.1:1/a@sha512:" + hex.EncodeToString(sum[:])
	checkRefused(t, openStore(t), reference, Auth{}, errdefs.IsNotImplemented, "sha512 digests are not supported")
	for name, test := range map[string]struct {
		spoil func(m *ocispec.Manifest)
		is    func(error) bool
		words string
	}{
		"encrypted":        {func(m *ocispec.Manifest) { m.Layers[0].MediaType += "+gzip+encrypted" }, errdefs.IsNotImplemented, "encrypted images are not supported"},
		"unknown type":     {func(m *ocispec.Manifest) { m.Layers[0].MediaType = "application/x-floppy" }, errdefs.IsNotImplemented, "application/x-floppy"},
		"sha512":           {func(m *ocispec.Manifest) { m.Layers[0].Digest = digest.Digest("sha512:" + hex.EncodeToString(sum[:])) }, errdefs.IsNotImplemented, "sha512"},
		"sha512 config":    {func(m *ocispec.Manifest) { m.Config.Digest = digest.Digest("sha512:" + hex.EncodeToString(sum[:])) }, errdefs.IsNotImplemented, "sha512"},
		"digest is a path": {func(m *ocispec.Manifest) { m.Layers[0].Digest = "sha256:../../../../etc/passwd" }, errdefs.IsInvalidArgument, "etc/passwd"},
		"no digest":        {func(m *ocispec.Manifest) { m.Config.Digest = "" }, errdefs.IsInvalidArgument, "digest"},
		"negative size":    {func(m *ocispec.Manifest) { m.Layers[0].Size = -1 }, errdefs.IsInvalidArgument, "-1 bytes"},
		"size zero":        {func(m *ocispec.Manifest) { m.Layers[0].Size = 0 }, errdefs.IsInvalidArgument, "0 bytes"},
		"endless size":     {func(m *ocispec.Manifest) { m.Layers[0].Size = 1<<63 - 1 }, errdefs.IsInvalidArgument, "9223372036854775807"},
		"too large":        {func(m *ocispec.Manifest) { m.Layers[0].Size = 1 << 60 }, errdefs.IsResourceExhausted, "1152921504606846976 bytes are needed"},
		"large config":     {func(m *ocispec.Manifest) { m.Config.Size = maxConfig + 1 }, errdefs.IsInvalidArgument, "4194305 bytes"},
		"artifact":         {func(m *ocispec.Manifest) { m.Config.MediaType = "application/vnd.cncf.helm.config.v1+json" }, errdefs.IsInvalidArgument, "helm.config"},
		"artifact type": {func(m *ocispec.Manifest) {
			m.ArtifactType, m.Config = "application/x-model", ocispec.DescriptorEmptyJSON
			m.Config.MediaType = ocispec.MediaTypeImageConfig
		}, errdefs.IsInvalidArgument, "application/x-model"},
		"many layers": {func(m *ocispec.Manifest) {
			for len(m.Layers) <= maxLayers {
				m.Layers = append(m.Layers, m.Layers[0])
			}
		}, errdefs.IsInvalidArgument, "257 layers"},
		"fewer layers than named": {func(m *ocispec.Manifest) { m.Layers = nil }, errdefs.IsInvalidArgument, "names 1 layers, the manifest 0"},
	} {
		t.Run(name, func(t *testing.T) {
			s, registry := openStore(t), newTestRegistry(t)
			manifest := registry.handmade(t)
			layer := manifest.Layers[0].Digest.String()
			test.spoil(&manifest)
			checkRefused(t, s, registry.name("spoilt:1", manifest.MediaType, manifest), Auth{}, test.is, test.words)
			harness.Same(t, "the layer was fetched", registry.blobGets(layer), nil)
			harness.Same(t, "the digest became a request", registry.seen(func(r seenRequest) bool { return strings.Contains(r.path, "passwd") }), nil)
			checkLeft(t, s, leftovers{})
		})
	}
}

// attack: images: a document is both manifest and index, or of Docker's schema 1, or 5 MiB long
// held: it is refused by its kind, the last one by its announced length
// field: containerd reports the last one as not found
func TestDocumentsOfTheWrongKind(t *testing.T) {
	for name, test := range map[string]struct {
		mediaType string
		spoil     func(document map[string]any)
		is        func(error) bool
		words     string
	}{
		"index as well":            {ocispec.MediaTypeImageManifest, func(d map[string]any) { d["manifests"] = []any{d["config"]} }, errdefs.IsInvalidArgument, "it is an index"},
		"manifest as well":         {ocispec.MediaTypeImageIndex, func(d map[string]any) { d["manifests"] = []any{} }, errdefs.IsInvalidArgument, "it is a manifest"},
		"schema 1":                 {ocispec.MediaTypeImageManifest, func(d map[string]any) { d["fsLayers"] = []any{1} }, errdefs.IsNotImplemented, "schema 1"},
		"5 MiB":                    {ocispec.MediaTypeImageManifest, func(d map[string]any) { d["x"] = strings.Repeat("x", 5<<20) }, errdefs.IsInvalidArgument, "more than 4194304 bytes"},
		"index of a configuration": {ocispec.MediaTypeImageIndex, func(d map[string]any) { d["manifests"] = []any{d["config"]}; delete(d, "config"); delete(d, "layers") }, errdefs.IsInvalidArgument, "names 1 layers, the manifest 0"},
		"no object":                {ocispec.MediaTypeImageIndex, func(d map[string]any) { clear(d); d["manifests"] = 1 }, errdefs.IsInvalidArgument, "index sha256:"},
	} {
		t.Run(name, func(t *testing.T) {
			s, registry := openStore(t), newTestRegistry(t)
			manifest := registry.handmade(t)
			document := map[string]any{"schemaVersion": 2, "config": manifest.Config, "layers": manifest.Layers}
			test.spoil(document)
			checkRefused(t, s, registry.name("kind:1", test.mediaType, document), Auth{}, test.is, test.words)
			checkLeft(t, s, leftovers{})
		})
	}
}

// attack: images: indexes are nested 3,000 deep
// held: it is refused below the eighth level
func TestDepthOfIndexesIsBounded(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	var nested mutate.Appendable = smallImage(t)
	var index v1.ImageIndex
	for range maxDepth {
		index = mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: nested})
		nested = index
	}
	pull(t, s, registry.push(t, "deep:8", index))
	index = mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: nested})
	checkRefused(t, s, registry.push(t, "deep:9", index), Auth{}, errdefs.IsInvalidArgument, "more than 8 deep")
}

// attack: images: an image has the largest accepted number of layers (256)
// held: it is mounted
func TestAsManyLayersAsAreLetInCanBeMounted(t *testing.T) {
	s, registry := openStoreAt(t, filepath.Join(inMemory(t), strings.Repeat("long", 20))), newTestRegistry(t)
	layers := make([]v1.Layer, maxLayers)
	for i := range layers {
		layers[i] = gzipLayer(t, tarOf(t, file(fmt.Sprint(i), "x")), types.OCILayer)
	}
	root := mountImage(t, s, pull(t, s, registry.push(t, "layers:1", imageOf(t, v1.Config{}, layers...))))
	for _, name := range []string{"0", fmt.Sprint(maxLayers - 1)} {
		_, err := os.Stat(filepath.Join(root, name))
		harness.Check(t, err)
	}
}

// inMemory is a directory on a tmpfs, where nothing has to be waited for.
func inMemory(t *testing.T) string {
	dir := t.TempDir()
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256m"))
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

func TestWrongDiffIDIsDataLoss(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	one := registry.handmade(t)
	one.Layers = []ocispec.Descriptor{registry.Blob(ocispec.MediaTypeImageLayer, tarOf(t, file("a", "two")))}
	checkRefused(t, s, registry.name("one:1", one.MediaType, one), Auth{}, errdefs.IsDataLoss, "")
	one.Layers = []ocispec.Descriptor{registry.Blob(ocispec.MediaTypeImageLayerGzip, []byte("neither tar nor gzip"))}
	checkRefused(t, s, registry.name("one:1", one.MediaType, one), Auth{}, errdefs.IsDataLoss, "")
}

func writeVerifier(t *testing.T, dir, name, script string) {
	must(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script), 0o755))
}

func TestVerifiersDecide(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "verifiers")
	s, registry := openStore(t, func(c *Config) { c.VerifierDir = dir }), newTestRegistry(t)
	img := smallImage(t)
	reference := registry.push(t, "signed:1", img)
	unverified := func(err error) bool { return errors.Is(err, ErrVerification) }
	refused := func(words string) { checkRefused(t, s, reference, Auth{}, unverified, words) }
	refused("no such file") // missing: closed
	must(t, os.Mkdir(dir, 0o755))
	refused("no verifier") // empty: closed
	writeVerifier(t, dir, "1", `[ "$2" = "`+reference+`" ] && [ "$4" = "`+digestOf(t, img)+`" ] && grep -q digest`)
	writeVerifier(t, dir, "2", `echo not signed by us; exit 1`)
	refused("not signed by us")
	harness.Want(t, len(registry.blobGets("")) == 0 && len(s.List()) == 0, "a refused image was fetched")
	writeVerifier(t, dir, "2", `exit 0`)
	pull(t, s, reference)
	for i := range 20 { // the library would stop at a number of them
		writeVerifier(t, dir, string(rune('a'+i)), "exit 0")
	}
	writeVerifier(t, dir, "y", "echo the last; exit 1")
	refused("the last")
	writeVerifier(t, dir, "1", "sleep 3600")
	s.Reconfigure(Config{VerifierDir: dir, VerifierTimeout: 200 * time.Millisecond})
	refused("")
}

// bigImage has one layer that does not compress, of 2 MiB.
func bigImage(t *testing.T) (img v1.Image, layer string) {
	l := layerOf(t, noise("big", 2<<20, 7))
	return imageOf(t, v1.Config{}, l), digestOf(t, l)
}

// cutAfter sends half of what is asked for, times times, and then resets the connection.
func cutAfter(times int32) faultFunc {
	var left atomic.Int32
	left.Store(times)
	return func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		if left.Add(-1) < 0 {
			return false
		}
		answer := httptest.NewRecorder()
		origin.ServeHTTP(answer, r)
		for key, values := range answer.Header() {
			w.Header()[key] = values
		}
		w.WriteHeader(answer.Code)
		_, _ = w.Write(answer.Body.Bytes()[:answer.Body.Len()/2])
		w.(http.Flusher).Flush()
		if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
			_ = conn.(*net.TCPConn).SetLinger(0)
			_ = conn.Close()
		}
		panic(http.ErrAbortHandler)
	}
}

func TestBrokenDownloadIsResumedByRange(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	img, layer := bigImage(t)
	reference := registry.push(t, "cut:1", img)
	registry.breakWith(onBlob(layer, cutAfter(7)))
	pull(t, s, reference)
	gets := registry.blobGets(layer)
	harness.Want(t, len(gets) == 8, "%d requests, want 8", len(gets))
	for _, get := range gets[1:] {
		harness.Want(t, strings.HasPrefix(get.byteRange, "bytes=") && get.byteRange != "bytes=0-",
			"request after a cut has range %q", get.byteRange)
	}
}

func TestStalledRegistryEndsThePull(t *testing.T) {
	s, registry := openStore(t, func(c *Config) { c.ProgressTimeout = time.Second }), newTestRegistry(t)
	img, layer := bigImage(t)
	reference := registry.push(t, "stall:1", img)
	registry.breakWith(onBlob(layer, func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		_, _ = w.Write(wholeBody(origin, r)[:1000])
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		return true
	}))
	_, err := s.Pull(t.Context(), reference, Auth{}, nil)
	harness.Want(t, errors.Is(err, ErrRegistryUnavailable), "error: %v", err)
	harness.Want(t, strings.Contains(err.Error(), layer), "error: %v", err)
	harness.Want(t, strings.Contains(err.Error(), "sent nothing for 1s"), "error: %v", err)
	checkLeft(t, s, leftovers{})
}

func TestWrongBytesAreRefusedByNameAndForgotten(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	img, layer := bigImage(t)
	reference := registry.push(t, "wrong:1", img)
	manifest, config := digestOf(t, img), idOf(t, img)
	flip := func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		body := wholeBody(origin, r)
		body[len(body)/2] ^= 1
		_, _ = w.Write(body)
		return true
	}
	for kind, digest := range map[string]string{"layer": layer, "configuration": config} {
		registry.breakWith(onBlob(digest, flip))
		checkRefused(t, s, reference, Auth{}, errdefs.IsDataLoss, kind+" "+digest)
		collected(t, s)
	}
	registry.breakWith(func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		return r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/manifests/") && flip(w, r, origin)
	})
	checkRefused(t, s, registry.host()+"/wrong@"+manifest, Auth{}, errdefs.IsDataLoss, "manifest "+manifest)
	registry.breakWith(nil)
	pull(t, s, reference)
}

// TestPullRepairsADamagedImage: the database still knows a document whose file is gone or wrong.
func TestPullRepairsADamagedImage(t *testing.T) {
	registry := newTestRegistry(t)
	img := imageOf(t, v1.Config{User: "7"}, layerOf(t, file("a", "1")))
	index := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: img})
	reference := registry.push(t, "damaged:1", index)
	damages := map[string]func(path string, data []byte) error{
		"gone":      func(path string, _ []byte) error { return os.Remove(path) },
		"truncated": func(path string, data []byte) error { return os.WriteFile(path, data[:len(data)/2], 0o600) },
		"rotten":    func(path string, data []byte) error { data[len(data)/2] ^= 1; return os.WriteFile(path, data, 0o600) },
	}
	for kind, digest := range map[string]string{"index": digestOf(t, index), "manifest": digestOf(t, img), "configuration": idOf(t, img)} {
		for damage, do := range damages {
			t.Run(damage+" "+kind, func(t *testing.T) {
				s := openStore(t)
				pull(t, s, reference)
				want := collected(t, s)
				path := filepath.Join(s.dir, "content", "blobs", "sha256", strings.TrimPrefix(digest, "sha256:"))
				data := harness.Read(t, path)
				must(t, do(path, bytes.Clone(data)))
				registry.breakWith(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
					if r.Method == http.MethodGet {
						refuse(w, http.StatusInternalServerError, "away")
					}
					return r.Method == http.MethodGet
				})
				checkRefused(t, s, reference, Auth{}, isUnavailable, digest)
				registry.breakWith(nil)
				must(t, s.Collect(t.Context())) // a repair that failed has lost nothing else
				harness.Same(t, "layers", entries(t, filepath.Join(s.dir, "overlayfs", "snapshots")), want.snapshots)
				pull(t, s, reference)
				checkFile(t, path, string(data))
				checkLeft(t, s, want)
				s = reopened(t, s)
				image, err := s.Get(reference)
				harness.Want(t, err == nil && image.Spec.Config.User == "7", "%+v, %v", image, err)
				checkFile(t, filepath.Join(mountImage(t, s, image), "a"), "1")
			})
		}
	}
}

func TestFailingRegistryIsUnavailableInItsOwnWords(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	reference := registry.push(t, "fail:1", smallImage(t))
	registry.breakWith(onBlob("", func(w http.ResponseWriter, _ *http.Request, _ http.Handler) bool {
		http.Error(w, "the disk is on fire", http.StatusInternalServerError)
		return true
	}))
	checkRefused(t, s, reference, Auth{}, isUnavailable, "the disk is on fire")
	registry.proxy.CloseClientConnections()
	registry.proxy.Close()
	checkRefused(t, s, reference, Auth{}, isUnavailable, "refused")
}

// Signed addresses, which blobs of large registries are redirected to, are not shown.
func TestSignaturesAreNotShown(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	img, layer := bigImage(t)
	reference := registry.push(t, "redirect:1", img)
	expired := newStranger(t, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "expired", http.StatusForbidden) })
	for address, is := range map[string]func(error) bool{expired.address(): errdefs.IsPermissionDenied, "http://127.0.0.1:1": isUnavailable} {
		registry.breakWith(onBlob(layer, func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			http.Redirect(w, r, address+r.URL.Path+"?signature=secret", http.StatusTemporaryRedirect)
			return true
		}))
		_, err := s.Pull(t.Context(), reference, Auth{}, nil)
		harness.Want(t, is(err) && !strings.Contains(err.Error(), "secret"), "error: %v", err)
	}
}

func TestCancelledPullLeavesNothing(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	img, layer := bigImage(t)
	reference := registry.push(t, "cancel:1", img)
	ctx, cancel := context.WithCancel(t.Context())
	registry.breakWith(onBlob(layer, func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		body := wholeBody(origin, r)
		_, _ = w.Write(body[:len(body)/2])
		w.(http.Flusher).Flush()
		cancel()
		<-r.Context().Done()
		return true
	}))
	_, err := s.Pull(ctx, reference, Auth{}, nil)
	harness.Want(t, errors.Is(err, context.Canceled), "error: %v", err)
	checkLeft(t, s, leftovers{})
	registry.breakWith(nil)
	pull(t, s, reference)
}
