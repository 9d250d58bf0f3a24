package e2e

import (
	"errors"
	"io"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// TestImagesOfANode is what a kubelet sees of an image by each of its calls, with
// and without a filter, when the configuration pins it.
//
// cri: Image.id Image.pinned Image.repo_tags Image.size ImageFilter.image ImageStatusRequest.verbose
// cri: ListImagesRequest.filter ListImagesResponse.images StreamImagesRequest.filter StreamImagesResponse.images
func TestImagesOfANode(t *testing.T) {
	n := harness.NewNode(t, harness.Config("[images]\npinned = [\""+harness.BusyboxImage+"\"]\n"))
	n.ImportBusybox()
	ctx := harness.Limited(t, patience)
	image := &runtimeapi.ImageSpec{Image: harness.BusyboxImage}
	answer, err := n.Image.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: image, Verbose: true})
	harness.Check(t, err)
	got := answer.GetImage()
	if got.GetId() == "" || got.GetSize() == 0 || !got.GetPinned() || len(got.GetRepoTags()) != 1 || got.GetRepoTags()[0] != harness.BusyboxImage || len(answer.GetInfo()) == 0 {
		t.Errorf("ImageStatus: %v", answer)
	}
	for name, filter := range map[string]struct {
		filter *runtimeapi.ImageFilter
		want   int
	}{
		"none":          {nil, 1},
		"by name":       {&runtimeapi.ImageFilter{Image: image}, 1},
		"by id":         {&runtimeapi.ImageFilter{Image: &runtimeapi.ImageSpec{Image: got.GetId()}}, 1},
		"of no image":   {&runtimeapi.ImageFilter{Image: &runtimeapi.ImageSpec{Image: "nowhere.example/none:1"}}, 0},
		"without image": {&runtimeapi.ImageFilter{}, 1},
	} {
		list, err := n.Image.ListImages(ctx, &runtimeapi.ListImagesRequest{Filter: filter.filter})
		harness.Check(t, err)
		streamed := streamImages(t, n, filter.filter)
		for what, images := range map[string][]*runtimeapi.Image{"list": list.GetImages(), "stream": streamed} {
			if len(images) != filter.want || filter.want == 1 && (images[0].GetId() != got.GetId() || !images[0].GetPinned()) {
				t.Errorf("%s, filter %s: %v", what, name, images)
			}
		}
	}
	_, err = n.Image.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: image})
	harness.Check(t, err)
	if left := streamImages(t, n, nil); len(left) != 0 {
		t.Errorf("a pinned image is still there after its removal: %v", left)
	}
}

func streamImages(t *testing.T, n *harness.Node, filter *runtimeapi.ImageFilter) (images []*runtimeapi.Image) {
	t.Helper()
	stream, err := n.Image.StreamImages(harness.Limited(t, patience), &runtimeapi.StreamImagesRequest{Filter: filter})
	harness.Check(t, err)
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return images
		}
		harness.Check(t, err)
		images = append(images, message.GetImages()...)
	}
}
