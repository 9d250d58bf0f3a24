package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// everything is an image with each kind of layer and of file.
func everything(t *testing.T) v1.Image {
	bottom := tarOf(t,
		dir("etc/"), file("etc/kept", "kept"), file("etc/gone", "gone"), dir("opaque/"), file("opaque/old", "old"),
		entry{tar.Header{Name: "setuid", Typeflag: tar.TypeReg, Mode: 0o4755, Uid: 12, Gid: 34}, []byte("x")},
		entry{tar.Header{Name: "xattr", Typeflag: tar.TypeReg, Mode: 0o644, PAXRecords: map[string]string{"SCHILY.xattr.user.colour": "blue"}}, nil},
		entry{tar.Header{Name: "null", Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 3}, nil},
		entry{tar.Header{Name: "fifo", Typeflag: tar.TypeFifo, Mode: 0o600}, nil},
	)
	middle := tarOf(t,
		file("etc/.wh.gone", ""), dir("opaque/"), file("opaque/.wh..wh..opq", ""), file("opaque/new", "new"),
		file("first", "linked"), hardlink("second", "first"),
	)
	top := tarOf(t, file("etc/kept", "changed"),
		symlink("soft", "/etc/kept"), file("odd \n näme/…", "odd"), file(strings.Repeat("d/", 120)+"deep", "deep"))
	config := v1.Config{
		User: "web:www", Env: []string{"A=b"}, Entrypoint: []string{"/bin/e"}, Cmd: []string{"c"}, WorkingDir: "/w",
		StopSignal: "SIGQUIT", Volumes: map[string]struct{}{"/v": {}}, Labels: map[string]string{"l": "m"},
	}
	return imageOf(t, config, gzipLayer(t, bottom, types.OCILayer), zstdLayer(t, middle), plainLayer(top))
}

func TestPullUnpacksEveryKindOfLayerAndFile(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	img := everything(t)
	image := pull(t, s, registry.push(t, "every/thing:1", img))
	harness.Want(t, image.ID == idOf(t, img), "id %s, want %s", image.ID, idOf(t, img))
	root := mountImage(t, s, image)
	checkEverything(t, root)
	value := make([]byte, 16)
	n, err := unix.Getxattr(filepath.Join(root, "xattr"), "user.colour", value)
	harness.Want(t, err == nil && string(value[:n]) == "blue", "xattr: %q, %v", value[:max(n, 0)], err)
	checkConfig(t, image)
}

// checkEverything looks for the files of the image everything.
func checkEverything(t *testing.T, root string) {
	for name, want := range map[string]string{
		"etc/kept": "changed", "opaque/new": "new", "first": "linked", "second": "linked",
		"odd \n näme/…": "odd", strings.Repeat("d/", 120) + "deep": "deep", "setuid": "x",
	} {
		checkFile(t, filepath.Join(root, name), want)
	}
	for _, name := range []string{"etc/gone", "opaque/old"} {
		_, err := os.Lstat(filepath.Join(root, name))
		harness.Want(t, errors.Is(err, fs.ErrNotExist), "%s is there, though a whiteout removed it: %v", name, err)
	}
	stat := func(name string) *syscall.Stat_t {
		info, err := os.Lstat(filepath.Join(root, name))
		must(t, err)
		return info.Sys().(*syscall.Stat_t)
	}
	st := stat("setuid")
	harness.Want(t, st.Mode == syscall.S_IFREG|0o4755, "setuid: mode %o, owner %d:%d", st.Mode, st.Uid, st.Gid)
	harness.Want(t, st.Uid == 12, "setuid: mode %o, owner %d:%d", st.Mode, st.Uid, st.Gid)
	harness.Want(t, st.Gid == 34, "setuid: mode %o, owner %d:%d", st.Mode, st.Uid, st.Gid)
	st = stat("null")
	harness.Want(t, st.Mode&syscall.S_IFMT == syscall.S_IFCHR && st.Rdev == unix.Mkdev(1, 3), "null: mode %o, device %x", st.Mode, st.Rdev)
	st = stat("fifo")
	harness.Want(t, st.Mode&syscall.S_IFMT == syscall.S_IFIFO, "fifo: mode %o", st.Mode)
	harness.Same(t, "the file of first and second", stat("first").Ino, stat("second").Ino)
}

func checkConfig(t *testing.T, image Image) {
	c := image.Spec.Config
	harness.Want(t, c.StopSignal == "SIGQUIT", "configuration: %+v", c)
	harness.Want(t, c.WorkingDir == "/w", "configuration: %+v", c)
	harness.Want(t, slices.Equal(c.Env, []string{"A=b"}), "configuration: %+v", c)
	harness.Want(t, c.Labels["l"] == "m", "configuration: %+v", c)
	harness.Want(t, slices.Equal(c.Entrypoint, []string{"/bin/e"}), "configuration: %+v", c)
	harness.Want(t, slices.Equal(c.Cmd, []string{"c"}), "configuration: %+v", c)
	harness.Want(t, len(c.Volumes) == 1, "configuration: %+v", c)
	uid, name := image.User()
	harness.Want(t, uid == nil && name == "web", "user %v %q, want web", uid, name)
	harness.Want(t, image.Size > 0, "size %d", image.Size)
}

func TestPullOfDockerSchema2(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	img := dockerImageOf(t, v1.Config{User: "1000"}, gzipLayer(t, tarOf(t, file("a", "1")), types.DockerLayer))
	image := pull(t, s, registry.push(t, "docker:2", img))
	uid, name := image.User()
	harness.Need(t, uid != nil, "user %v %q, want 1000", uid, name)
	harness.Want(t, *uid == 1000, "user %v %q, want 1000", uid, name)
	harness.Want(t, name == "", "user %v %q, want 1000", uid, name)
	checkFile(t, filepath.Join(mountImage(t, s, image), "a"), "1")
}

func TestImageIsTheSameUnderEachOfItsNames(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	img := smallImage(t)
	one, two := registry.push(t, "lib/name:one", img), registry.push(t, "lib/name:two", img)
	pinned := registry.host() + "/lib/name@" + digestOf(t, img)
	image := pull(t, s, pinned)
	harness.Want(t, len(image.RepoTags) == 0 && slices.Equal(image.RepoDigests, []string{pinned}), "names %v %v", image.RepoTags, image.RepoDigests)
	pull(t, s, one)
	image = pull(t, s, two)
	harness.Same(t, "tag and digest", pull(t, s, two+"@"+digestOf(t, img)).ID, image.ID)
	harness.Want(t, slices.Equal(image.RepoTags, []string{one, two}) && slices.Equal(image.RepoDigests, []string{pinned}),
		"names %v %v", image.RepoTags, image.RepoDigests)
	for _, name := range []string{one, two, pinned, image.ID, strings.TrimPrefix(image.ID, "sha256:"), image.ID[7:20]} {
		got, err := s.Get(name)
		harness.Want(t, err == nil && got.ID == image.ID, "get %s: %s, %v", name, got.ID, err)
	}
	untag(t, s, one)
	_, err := s.Get(one)
	harness.Want(t, errdefs.IsNotFound(err), "removed tag: %v", err)
	left, err := s.Get(pinned)
	harness.Want(t, err == nil && slices.Equal(left.RepoTags, []string{two}), "after removing one tag: %v, %v", left.RepoTags, err)
	untag(t, s, two)
	harness.Same(t, "the digest outlived the last tag", s.List(), nil)
	untag(t, s, two)                                           // again: no error
	for _, unknown := range []string{image.ID, image.ID[7:]} { // no bad name
		remove(t, s, unknown)
		_, err := s.Get(unknown)
		harness.Want(t, errdefs.IsNotFound(err), "%s: %v", unknown, err)
	}
}

func untag(t *testing.T, s *Store, name string) { must(t, s.Untag(t.Context(), name)) }

// The CRI: RemoveImage removes all tags, whichever name it is given.
func TestRemoveByIDRemovesAllNames(t *testing.T) {
	registry := newTestRegistry(t)
	img := smallImage(t)
	one, two := registry.push(t, "one:1", img), registry.push(t, "two:2", img)
	for name, of := range map[string]func(Image) string{
		"tag":    func(Image) string { return one },
		"digest": func(i Image) string { return i.RepoDigests[1] },
		"id":     func(i Image) string { return i.ID },
		"prefix": func(i Image) string { return i.ID[7:20] },
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t, func(c *Config) { c.Pinned = []string{one} }) // which keeps it from nobody who asks
			pull(t, s, one)
			image := pull(t, s, two)
			harness.Want(t, image.Pinned, "%+v is not pinned", image)
			checkLeft(t, s, leftovers{blobs: 2, snapshots: 1, records: 1}) // a manifest, a configuration and a layer
			remove(t, s, of(image))
			harness.Same(t, "layers on the disk after Remove", entries(t, LayersDir(filepath.Dir(s.dir))), 0)
			checkLeft(t, s, leftovers{})
			remove(t, s, of(image)) // again: no error
		})
	}
}

// A removal whose caller cannot wait for a collection that takes long ends with its caller, and has removed the image.
func TestRemoveBesideALongCollection(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "one:1", smallImage(t)))
	must(t, s.collecting.Acquire(t.Context(), 1))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must(t, s.Remove(ctx, image.ID))
	layers := entries(t, LayersDir(filepath.Dir(s.dir)))
	harness.Want(t, len(s.List()) == 0 && layers == 1, "%d images and %d layers are left", len(s.List()), layers)
	s.collecting.Release(1)
	checkLeft(t, s, leftovers{})
}

func remove(t *testing.T, s *Store, refOrID string) { must(t, s.Remove(t.Context(), refOrID)) }

// TestMovedTag: a tag that points elsewhere leaves the old image under its
// digest, for the containers that run from it and the kubelet to remove.
func TestMovedTag(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	reference := registry.push(t, "moved:1", imageOf(t, v1.Config{}, layerOf(t, file("a", "old"))))
	before := pull(t, s, reference)
	registry.push(t, "moved:1", imageOf(t, v1.Config{}, layerOf(t, file("a", "new"))))
	after := pull(t, s, reference)
	old, err := s.Get(before.ID)
	harness.Need(t, err == nil && len(old.RepoTags) == 0, "the old image: %+v, %v", old, err)
	harness.Want(t, len(old.RepoDigests) == 1, "the old image: %+v, %v", old, err)
	got, err := s.Get(reference)
	harness.Need(t, err == nil, "the tag: %s, %v", got.ID, err)
	harness.Want(t, got.ID == after.ID, "the tag: %s, %v", got.ID, err)
	harness.Want(t, after.ID != before.ID, "the tag: %s, %v", got.ID, err)
}

// TestHostileLayersStayInside: names and links that point out of the layer.
func TestHostileLayersStayInside(t *testing.T) {
	s, registry, outside := openStore(t), newTestRegistry(t), t.TempDir()
	image := pull(t, s, registry.push(t, "hostile:1", imageOf(t, v1.Config{},
		layerOf(t, symlink("out", outside), symlink("up", "../../../../../../../.."+outside)),
		layerOf(t, file("out/a", "x"), file("up/b", "x"), file("../../../../../../../.."+outside+"/c", "x"), file(outside+"/d", "x")))))
	root := mountImage(t, s, image)
	harness.Same(t, "files outside", entries(t, outside), 0)
	checkFile(t, filepath.Join(root, outside, "d"), "x")
}

// sharing pushes images that have most of their layers in common.
func sharing(t *testing.T, registry *testRegistry, count int) (references, layers []string) {
	common := []v1.Layer{layerOf(t, noise("base", 1<<20, 1)), layerOf(t, noise("lib", 1<<19, 2)), layerOf(t, file("etc/x", "x"))}
	for _, l := range common {
		layers = append(layers, digestOf(t, l))
	}
	for i := range count {
		own := layerOf(t, file("app", fmt.Sprint("app ", i)))
		layers = append(layers, digestOf(t, own))
		img := imageOf(t, v1.Config{}, append(append([]v1.Layer{}, common...), own)...)
		references = append(references, registry.push(t, fmt.Sprintf("share/%d:1", i), img))
	}
	return references, layers
}

func TestTwentyPullsFetchEachLayerOnce(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	references, layers := sharing(t, registry, 5)
	registry.breakWith(onBlob("", func(http.ResponseWriter, *http.Request, http.Handler) bool {
		registry.awaitHeads(t, 20) // so that pulls meet
		return false
	}))
	var work sync.WaitGroup
	for i := range 20 {
		work.Go(func() {
			_, err := s.Pull(t.Context(), references[i%5], Auth{}, nil)
			harness.Same(t, "a pull's error", err, nil)
		})
	}
	work.Wait()
	for _, layer := range layers {
		harness.Same(t, "requests for layer "+layer, len(registry.blobGets(layer)), 1)
	}
	checkLeft(t, s, leftovers{blobs: 10, snapshots: 8, records: 5})
	for i, image := range s.List() {
		must(t, s.Prepare(t.Context(), fmt.Sprint(i), image.ID, PrepareOptions{}))
	}
}

// awaitHeads waits until so many pulls have begun.
func (r *testRegistry) awaitHeads(t *testing.T, count int) {
	harness.Eventually(t, "pulls have begun", func() bool {
		return len(r.seen(func(s seenRequest) bool { return s.method == http.MethodHead })) >= count
	})
}

// TestOneCancelledPullDoesNotEndOthers cancels the one pull that fetches the
// shared layer while equal pulls and pulls of other images wait for it.
func TestOneCancelledPullDoesNotEndOthers(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	references, layers := sharing(t, registry, 3)
	reached, heal := make(chan struct{}, 20), make(chan struct{})
	registry.breakWith(onBlob(layers[0], func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		reached <- struct{}{}
		select {
		case <-heal:
		case <-r.Context().Done():
		}
		return false
	}))
	ctx, cancel := context.WithCancel(t.Context())
	var first, others sync.WaitGroup
	first.Go(func() {
		_, err := s.Pull(ctx, references[0], Auth{}, nil)
		harness.Want(t, errors.Is(err, context.Canceled), "the cancelled pull: %v", err)
	})
	<-reached
	for i := range 6 {
		others.Go(func() {
			_, err := s.Pull(t.Context(), references[i%3], Auth{}, nil)
			harness.Same(t, "a pull's error", err, nil)
		})
	}
	registry.awaitHeads(t, 7)
	cancel()
	first.Wait()
	close(heal)
	others.Wait()
	checkLeft(t, s, leftovers{blobs: 6, snapshots: 6, records: 3})
}

func TestCloseEndsRunningPulls(t *testing.T) {
	registry := newTestRegistry(t)
	reference := registry.push(t, "close:1", smallImage(t))
	reached := make(chan struct{}, 1)
	registry.breakWith(onBlob("", func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		select {
		case reached <- struct{}{}:
		default:
		}
		<-r.Context().Done()
		return true
	}))
	s, err := Open(t.Context(), Config{Root: filepath.Join(t.TempDir(), "root")})
	must(t, err)
	failed := make(chan error)
	go func() {
		_, err := s.Pull(t.Context(), reference, Auth{}, nil)
		failed <- err
	}()
	<-reached
	must(t, s.Close())
	harness.Want(t, <-failed != nil, "the pull succeeded on a closed store")
	_, err = s.Pull(t.Context(), reference, Auth{}, nil)
	harness.Want(t, err != nil, "a closed store pulls")
}

// trickle sends one byte at a time until the client goes.
func trickle(every time.Duration) faultFunc {
	return func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		for _, one := range wholeBody(origin, r) {
			_, _ = w.Write([]byte{one})
			w.(http.Flusher).Flush()
			select {
			case <-r.Context().Done():
				return true
			case <-time.After(every):
			}
		}
		return true
	}
}

// attack: registries: a tenant's registry sends a popular layer byte by byte while others pull it
// held: they stop waiting after 10 s below 64 KiB/s, and fetch the layer themselves
// field: containerd's other pulls wait as long as the attacker wishes
func TestSlowPullIsNotWaitedFor(t *testing.T) {
	s := openStore(t, func(c *Config) { c.waitWindow = time.Second })
	shared, own := layerOf(t, noise("base", 1<<20, 1)), layerOf(t, file("app", "victim"))
	tenant, registry := newTestRegistry(t), newTestRegistry(t)
	attack := tenant.push(t, "attacker:1", imageOf(t, v1.Config{User: "1"}, shared))
	victim := registry.push(t, "victim:1", imageOf(t, v1.Config{}, shared, own))
	tenant.breakWith(onBlob(digestOf(t, shared), trickle(50*time.Millisecond)))
	attacked := make(chan error, 1)
	go func() {
		_, err := s.Pull(t.Context(), attack, Auth{}, nil)
		attacked <- err
	}()
	harness.Eventually(t, "the layer is asked for", func() bool { return len(tenant.blobGets(digestOf(t, shared))) > 0 })
	pull(t, s, victim)
	select {
	case err := <-attacked:
		t.Errorf("the attacker's pull ended: %v", err)
	default:
	}
	tenant.breakWith(nil)
	tenant.proxy.CloseClientConnections() // the next try is quick
	must(t, <-attacked)
	checkLeft(t, s, leftovers{blobs: 4, snapshots: 2, records: 2})
}

// attack: registries: a registry sends one byte now and then, for ever
// held: the pull ends if the average over progress_timeout is below min_rate
// field: containerd requires only one byte per progress_timeout
func TestTrickleEndsThePull(t *testing.T) {
	s := openStore(t, func(c *Config) { c.ProgressTimeout, c.MinRate = 2*time.Second, 1024 })
	registry := newTestRegistry(t)
	img, layer := bigImage(t)
	reference := registry.push(t, "trickle:1", img)
	registry.breakWith(onBlob(layer, trickle(20*time.Millisecond)))
	checkRefused(t, s, reference, Auth{}, isUnavailable, "less than the minimum of 1024 bytes per second")
}

// endless answers with bytes that do not end before the client goes.
func endless(w http.ResponseWriter, r *http.Request) {
	for block := []byte(strings.Repeat("x", 64<<10)); r.Context().Err() == nil; {
		if _, err := w.Write(block); err != nil {
			return
		}
	}
}

// attack: registries: a manifest, a token or an error never ends
// held: 4 MiB of it are read
// field: containerd reads a manifest without Docker-Content-Digest without end
func TestEndlessAnswersAreCutOff(t *testing.T) {
	registry := newTestRegistry(t)
	reference := registry.push(t, "endless:1", smallImage(t))
	manifest := strings.TrimSuffix(reference, ":1") + "@" + digestOf(t, smallImage(t))
	for name, test := range map[string]struct {
		reference string
		fault     faultFunc
	}{
		"manifest": {reference, func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			if r.Method == http.MethodGet {
				endless(w, r)
			}
			return strings.Contains(r.URL.Path, "/manifests/")
		}},
		"by digest": {manifest, func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			if strings.Contains(r.URL.Path, "/manifests/") {
				http.NotFound(w, r)
			} else if r.Method == http.MethodGet {
				endless(w, r)
			}
			return true
		}},
		"token": {reference, func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			if r.URL.Path == "/blobs/token" {
				_, _ = fmt.Fprint(w, `{"token":"`)
				endless(w, r)
				return true
			}
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+r.Host+`/blobs/token"`)
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}},
		"error": {reference, func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			w.WriteHeader(http.StatusForbidden)
			if r.Method == http.MethodGet {
				endless(w, r)
			}
			return true
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t)
			registry.breakWith(test.fault)
			_, err := s.Pull(t.Context(), test.reference, Auth{}, nil)
			harness.Want(t, err != nil && !errdefs.IsUnavailable(err), "error: %v", err)
		})
	}
}
