package server

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/errtext"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/stats"
)

// ImageServer implements runtime.v1.ImageService.
type ImageServer struct {
	runtimeapi.UnimplementedImageServiceServer
	runtime *Runtime
}

// ListImages lists all images, or the one that the filter names.
func (s *ImageServer) ListImages(_ context.Context, request *runtimeapi.ListImagesRequest) (*runtimeapi.ListImagesResponse, error) {
	images, err := s.list(request.GetFilter())
	return &runtimeapi.ListImagesResponse{Images: images}, err
}

// StreamImages sends the same list in pieces.
func (s *ImageServer) StreamImages(request *runtimeapi.StreamImagesRequest, stream grpc.ServerStreamingServer[runtimeapi.StreamImagesResponse]) error {
	images, err := s.list(request.GetFilter())
	if err != nil {
		return err
	}
	return sendPieces(images, func(piece []*runtimeapi.Image) error {
		return stream.Send(&runtimeapi.StreamImagesResponse{Images: piece})
	})
}

func (s *ImageServer) list(filter *runtimeapi.ImageFilter) ([]*runtimeapi.Image, error) {
	if err := s.checkHandler(filter.GetImage()); err != nil {
		return nil, err
	}
	if wanted := filter.GetImage().GetImage(); wanted != "" {
		one, err := s.runtime.Images.Get(wanted)
		switch {
		case errdefs.IsNotFound(err):
			return nil, nil
		case err != nil:
			return nil, err
		}
		return []*runtimeapi.Image{criImage(one)}, nil
	}
	var images []*runtimeapi.Image
	for _, one := range s.runtime.Images.List() {
		images = append(images, criImage(one))
	}
	return images, nil
}

// ImageStatus describes one image. For an image that is not there the answer is empty.
func (s *ImageServer) ImageStatus(ctx context.Context, request *runtimeapi.ImageStatusRequest) (*runtimeapi.ImageStatusResponse, error) {
	wanted, err := s.imageName(request.GetImage())
	if err != nil {
		return nil, err
	}
	found, err := s.runtime.Images.Get(wanted)
	if errdefs.IsNotFound(err) {
		return &runtimeapi.ImageStatusResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	response := &runtimeapi.ImageStatusResponse{Image: criImage(found)}
	if !request.GetVerbose() {
		return response, nil
	}
	described, err := s.runtime.Images.Describe(ctx, found.ID)
	if err != nil {
		return nil, err
	}
	response.Info, err = encodeInfo(map[string]any{ // crictl inspecti shows it
		"info": map[string]any{"chainID": described.ChainID, "target": described.Target, "imageSpec": described.ImageSpec},
	})
	return response, err
}

// PullImage makes an image complete and durable, and answers with its id (Image.id).
func (s *ImageServer) PullImage(ctx context.Context, request *runtimeapi.PullImageRequest) (*runtimeapi.PullImageResponse, error) {
	if request.GetSandboxConfig().GetWindows() != nil {
		return nil, notWindows("sandbox_config.windows")
	}
	wanted, err := s.imageName(request.GetImage())
	if err != nil {
		return nil, err
	}
	row := step.Row{Step: wanted, Start: time.Now()}
	a := request.GetAuth()
	pulled, err := s.runtime.Images.Pull(ctx, wanted, image.Auth{
		Username: a.GetUsername(), Password: a.GetPassword(), Auth: a.GetAuth(), ServerAddress: a.GetServerAddress(),
		IdentityToken: a.GetIdentityToken(), RegistryToken: a.GetRegistryToken(),
	}, nil)
	row.Took = time.Since(row.Start)
	if err != nil {
		row.Error = errtext.Of(err)
	} else {
		row.Note = units.BytesSize(float64(pulled.Size))
	}
	if s.runtime.Sandboxes != nil {
		s.runtime.Sandboxes.NotePull(request.GetSandboxConfig(), row)
	}
	return &runtimeapi.PullImageResponse{ImageRef: pulled.ID}, err
}

// RemoveImage removes an image with all of its names, pinned or not. A missing one is no error.
func (s *ImageServer) RemoveImage(ctx context.Context, request *runtimeapi.RemoveImageRequest) (*runtimeapi.RemoveImageResponse, error) {
	wanted, err := s.imageName(request.GetImage())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.RemoveImageResponse{}, s.runtime.Images.Remove(ctx, wanted)
}

// ImageFsInfo measures images, and adds up the writable layers of containers, which share a filesystem.
func (s *ImageServer) ImageFsInfo(ctx context.Context, _ *runtimeapi.ImageFsInfoRequest) (*runtimeapi.ImageFsInfoResponse, error) {
	images, err := s.runtime.Images.ImageUsage(ctx)
	if err != nil {
		return nil, err
	}
	layers, err := s.runtime.Images.Snapshots(ctx)
	if err != nil {
		return nil, err
	}
	containers := s.runtime.Stats.Layers(ctx, layers)
	containers.Mountpoint = images.Mountpoint
	return &runtimeapi.ImageFsInfoResponse{
		ImageFilesystems:     []*runtimeapi.FilesystemUsage{stats.Filesystem(images)},
		ContainerFilesystems: []*runtimeapi.FilesystemUsage{stats.Filesystem(containers)},
	}, nil
}

// imageName returns the image of a spec, whose annotations have no effect.
func (s *ImageServer) imageName(spec *runtimeapi.ImageSpec) (string, error) {
	if spec.GetImage() == "" {
		return "", fmt.Errorf("no image is named: %w", errdefs.ErrInvalidArgument)
	}
	return spec.GetImage(), s.checkHandler(spec)
}

// checkHandler refuses a runtime handler that the node does not have.
func (s *ImageServer) checkHandler(spec *runtimeapi.ImageSpec) error {
	handler := spec.GetRuntimeHandler()
	if handler == "" || slices.Contains(s.runtime.Info.Handlers.Names(), handler) {
		return nil
	}
	return fmt.Errorf("image.runtime_handler: %q is unknown, this runtime has %q: %w", handler, s.runtime.Info.Handlers.Names(), errdefs.ErrInvalidArgument)
}

func criImage(i image.Image) *runtimeapi.Image {
	uid, name := i.User()
	out := &runtimeapi.Image{
		Id: i.ID, Spec: &runtimeapi.ImageSpec{Image: i.ID}, Size: uint64(i.Size), Pinned: i.Pinned,
		RepoTags: i.RepoTags, RepoDigests: i.RepoDigests, Username: name,
	}
	if uid != nil {
		out.Uid = &runtimeapi.Int64Value{Value: *uid}
	}
	return out
}
