package main

import (
	"context"
	"io"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/server"
)

// daemonImages asks a running daemon.
type daemonImages struct {
	server.ImageTransferClient
	connection *grpc.ClientConn
}

func (d daemonImages) Import(ctx context.Context, archive io.Reader) ([]listedImage, error) {
	imported, err := d.ImageTransferClient.Import(ctx, archive)
	all := make([]listedImage, len(imported))
	for i, one := range imported {
		all[i] = listedImage{ID: one.ID, Names: one.Tags, Size: one.Size}
	}
	return all, err
}

func (d daemonImages) Pull(ctx context.Context, reference, platform string, auth image.Auth, progress func(image.Progress)) (listedImage, error) {
	request := server.TransferRequest{Reference: reference, Platform: platform, Auth: auth}
	pulled, err := d.ImageTransferClient.Pull(ctx, request, progress)
	return listedImage{ID: pulled.ID, Names: pulled.Tags, Size: pulled.Size}, err
}

func (d daemonImages) List(ctx context.Context) ([]listedImage, error) {
	response, err := runtimeapi.NewImageServiceClient(d.connection).ListImages(ctx, &runtimeapi.ListImagesRequest{})
	if err != nil {
		return nil, err
	}
	var all []listedImage
	for _, one := range response.GetImages() {
		names := one.GetRepoTags()
		if len(names) == 0 {
			names = one.GetRepoDigests()
		}
		all = append(all, listedImage{ID: one.GetId(), Names: names, Size: int64(one.GetSize())})
	}
	return all, nil
}

func (d daemonImages) Remove(ctx context.Context, refOrID string) error {
	spec := &runtimeapi.ImageSpec{Image: refOrID}
	_, err := runtimeapi.NewImageServiceClient(d.connection).RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: spec})
	return err
}

func (d daemonImages) Close() error { return d.connection.Close() }

// storeImages works on the store itself; no daemon holds it.
type storeImages struct{ *image.Store }

func (s storeImages) Import(ctx context.Context, archive io.Reader) ([]listedImage, error) {
	imported, err := s.Store.Import(ctx, archive)
	return listedImages(imported), err
}

func (s storeImages) Pull(ctx context.Context, reference, platform string, auth image.Auth, progress func(image.Progress)) (listedImage, error) {
	pulled, err := s.PullFor(ctx, reference, platform, auth, progress)
	return listedImages([]image.Image{pulled})[0], err
}

func (s storeImages) Tag(ctx context.Context, refOrID, name string) error {
	_, err := s.Store.Tag(ctx, refOrID, name)
	return err
}

func (s storeImages) List(context.Context) ([]listedImage, error) {
	return listedImages(s.Store.List()), nil
}

// Close collects first: there is no background once the process ends.
func (s storeImages) Close() error {
	err := s.Collect(context.Background())
	if closeErr := s.Store.Close(); err == nil {
		err = closeErr
	}
	return err
}

func listedImages(images []image.Image) []listedImage {
	all := make([]listedImage, len(images))
	for i, one := range images {
		names := one.RepoTags
		if len(names) == 0 {
			names = one.RepoDigests
		}
		all[i] = listedImage{ID: one.ID, Names: names, Size: one.Size}
	}
	return all
}
