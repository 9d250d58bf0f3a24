package server

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/stats"
	"github.com/minicri/minicri/test/harness"
	hostile "github.com/minicri/minicri/test/hostile/registry"
)

// imageNode is an image service over a real store, called over a real socket.
type imageNode struct {
	runtimeapi.ImageServiceClient
	content *hostile.Registry
	host    string
}

func newImageNode(t testing.TB, change ...func(*image.Config)) *imageNode {
	harness.Want(t, os.Getuid() == 0, "the image store makes overlays: run this test as root")
	content := hostile.New()
	registry := httptest.NewServer(content)
	host := strings.TrimPrefix(registry.URL, "http://")
	config := image.Config{Root: t.TempDir(), Logger: slog.New(slog.DiscardHandler), Pinned: []string{host + "/life:1"}}
	for _, f := range change {
		f(&config)
	}
	store, err := image.Open(t.Context(), config)
	must(t, err)
	t.Cleanup(func() {
		registry.Close()
		must(t, store.Close())
	})
	meter, err := stats.Open(t.Context(), store, config.Logger)
	must(t, err)
	handlers := handler.New(map[string]handler.Spec{"kata": {}}, handler.Features{})
	server := New(&Runtime{Images: store, Stats: meter, Info: Info{Handlers: handlers}}, nil, config.Logger)
	return &imageNode{runtimeapi.NewImageServiceClient(serveOnSocket(t, server)), content, host}
}

// push names an image of one file, which makes it differ from others.
func (n *imageNode) push(path, text string, config ocispec.ImageConfig) string {
	m := n.content.Image(config, hostile.Layer(hostile.File("file", 0o644, text)))
	n.content.Manifest(path, m.MediaType, m)
	return n.host + "/" + path
}

func named(text string) *runtimeapi.ImageSpec { return &runtimeapi.ImageSpec{Image: text} }

func (n *imageNode) pull(t testing.TB, reference string) string {
	response, err := n.PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: named(reference)})
	must(t, err)
	return response.GetImageRef()
}

// The line of a pull says for which pod it was, and what came of it.
func TestPullIsLogged(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "log"))
	must(t, err)
	defer file.Close()
	node := newImageNode(t, func(c *image.Config) { c.Logger = slog.New(slog.NewTextHandler(file, nil)) })
	pod := &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "test"}}
	pull := func(reference string) error {
		_, err := node.PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: named(reference), SandboxConfig: pod})
		return err
	}
	reference := node.push("logged:1", "x", ocispec.ImageConfig{})
	must(t, pull(reference))
	absent := strings.Replace(reference, "logged", "absent", 1)
	harness.Want(t, pull(absent) != nil, "an image was pulled that is not there")
	log := harness.Read(t, file.Name())
	for _, words := range [][]string{
		{"level=INFO", `msg="image pulled"`, "image=" + reference, "size=", "took="},
		{"level=WARN", "method=PullImage", "image=" + absent},
	} {
		harness.Want(t, slices.ContainsFunc(strings.Split(string(log), "\n"), func(line string) bool {
			return strings.Contains(line, "namespace=test pod=web") && !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) })
		}), "no line with %q in\n%s", words, log)
	}
}

// cri: Image.repo_digests Image.repo_tags Image.size Image.uid Image.username ImageFilter.image ImageStatus
// cri: ImageStatusRequest.image ImageStatusRequest.verbose ImageStatusResponse.image ImageStatusResponse.info
// cri: ListImages ListImagesRequest.filter ListImagesResponse.images Image.pinned
func TestImageLife(t *testing.T) {
	node := newImageNode(t)
	reference := node.push("life:1", "x", ocispec.ImageConfig{User: "1001:5", Env: []string{"A=b"}})
	absent, err := node.ImageStatus(t.Context(), &runtimeapi.ImageStatusRequest{Image: named(reference)})
	harness.Want(t, err == nil && absent.GetImage() == nil, "before the pull: %v, %v", absent, err)
	id := node.pull(t, reference)
	got, err := node.ImageStatus(t.Context(), &runtimeapi.ImageStatusRequest{Image: named(reference), Verbose: true})
	must(t, err)
	i := got.GetImage()
	harness.Want(t, i.GetId() == id, "status: %v", got)
	harness.Want(t, i.GetSize() != 0, "status: %v", got)
	harness.Want(t, i.GetUid().GetValue() == 1001, "status: %v", got)
	harness.Want(t, i.GetPinned(), "status: %v", got)
	harness.Want(t, i.GetUsername() == "", "status: %v", got)
	harness.Want(t, len(i.GetRepoTags()) == 1, "status: %v", got)
	harness.Want(t, len(i.GetRepoDigests()) == 1, "status: %v", got)
	harness.Want(t, strings.Contains(got.GetInfo()["info"], `"A=b"`), "status: %v", got)
	for filter, want := range map[string]int{"": 1, id: 1, reference: 1, "other": 0} {
		list, err := node.ListImages(t.Context(), &runtimeapi.ListImagesRequest{Filter: &runtimeapi.ImageFilter{Image: named(filter)}})
		harness.Want(t, err == nil && len(list.GetImages()) == want, "list %q: %d images, %v", filter, len(list.GetImages()), err)
	}
	for range 2 {
		_, err := node.RemoveImage(t.Context(), &runtimeapi.RemoveImageRequest{Image: named(id)})
		harness.Check(t, err)
	}
	list, err := node.ListImages(t.Context(), &runtimeapi.ListImagesRequest{})
	harness.Want(t, err == nil && len(list.GetImages()) == 0, "after the removal: %v, %v", list, err)
}

// cri: Image.id PullImageResponse.image_ref StreamImages StreamImagesResponse.images StreamImagesRequest.filter
func TestStreamImagesSendsEachOnce(t *testing.T) {
	node := newImageNode(t)
	last := ""
	for i := range 5 {
		last = node.push(fmt.Sprintf("stream/%d:1", i), fmt.Sprint(i), ocispec.ImageConfig{})
		node.pull(t, last)
	}
	for filter, want := range map[string]int{"": 5, last: 1} {
		stream, err := node.StreamImages(t.Context(), &runtimeapi.StreamImagesRequest{Filter: &runtimeapi.ImageFilter{Image: named(filter)}})
		must(t, err)
		seen := map[string]bool{}
		for {
			part, err := stream.Recv()
			if err == io.EOF {
				break
			}
			must(t, err)
			for _, i := range part.GetImages() {
				harness.Want(t, !seen[i.GetId()], "%s came twice", i.GetId())
				seen[i.GetId()] = true
			}
		}
		harness.Want(t, len(seen) == want, "%d images, want %d", len(seen), want)
	}
}

// cri: FilesystemIdentifier.mountpoint FilesystemUsage.fs_id FilesystemUsage.inodes_used
// cri: FilesystemUsage.timestamp FilesystemUsage.used_bytes ImageFsInfo
// cri: ImageFsInfoResponse.container_filesystems ImageFsInfoResponse.image_filesystems UInt64Value.value
func TestImageFsInfo(t *testing.T) {
	node := newImageNode(t)
	node.pull(t, node.push("fs:1", strings.Repeat("x", 100_000), ocispec.ImageConfig{}))
	info, err := node.ImageFsInfo(t.Context(), &runtimeapi.ImageFsInfoRequest{})
	harness.Need(t, err == nil && len(info.GetImageFilesystems()) == 1, "%v, %v", info, err)
	harness.Need(t, len(info.GetContainerFilesystems()) == 1, "%v, %v", info, err)
	images, containers := info.GetImageFilesystems()[0], info.GetContainerFilesystems()[0]
	harness.Want(t, images.GetUsedBytes().GetValue() >= 100_000, "images: %v", images)
	harness.Want(t, images.GetInodesUsed().GetValue() != 0, "images: %v", images)
	harness.Want(t, images.GetTimestamp() != 0, "images: %v", images)
	harness.Want(t, containers.GetTimestamp() != 0 && containers.GetFsId().GetMountpoint() == images.GetFsId().GetMountpoint(),
		"containers: %v", containers)
	_, err = os.Stat(images.GetFsId().GetMountpoint())
	harness.Check(t, err)
}

// cri: PullImage PullImageRequest.image
func TestPullErrorsHaveTheNamesAndCodesThatTheKubeletKnows(t *testing.T) {
	verifiers := filepath.Join(t.TempDir(), "none")
	open, closed := newImageNode(t), newImageNode(t, func(c *image.Config) { c.VerifierDir = verifiers })
	private := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("WWW-Authenticate", `Basic realm="private"`)
		w.WriteHeader(http.StatusUnauthorized)
	}))
	defer private.Close()
	for title, test := range map[string]struct {
		node      *imageNode
		reference string
		code      codes.Code
		begins    string
	}{
		"nothing":     {open, "", codes.InvalidArgument, "no image is named"},
		"not a name":  {open, "A B", codes.InvalidArgument, "image reference"},
		"not there":   {open, open.host + "/no/such:1", codes.NotFound, "pull " + open.host},
		"no login":    {open, strings.TrimPrefix(private.URL, "http://") + "/x:1", codes.Unauthenticated, "pull "},
		"unreachable": {open, "127.0.0.1:1/x:1", codes.Unknown, "RegistryUnavailable: "},
		"unverified":  {closed, closed.push("signed:1", "x", ocispec.ImageConfig{}), codes.Unknown, "SignatureValidationFailed: "},
	} {
		t.Run(title, func(t *testing.T) {
			_, err := test.node.PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: named(test.reference)})
			harness.Want(t, status.Code(err) == test.code && strings.HasPrefix(status.Convert(err).Message(), test.begins), "error: %v", err)
		})
	}
}
