package server

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"

	"github.com/minicri/minicri/image"
)

// ImageTransferClient calls the transfer service of a daemon.
type ImageTransferClient struct{ Connection grpc.ClientConnInterface }

// partSize is how much of an archive goes into one message.
const partSize = 1 << 20

// Import sends an archive and returns the images in it.
func (c ImageTransferClient) Import(ctx context.Context, archive io.Reader) ([]TransferredImage, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	opened, err := c.Connection.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, "/"+transferService+"/Import")
	if err != nil {
		return nil, err
	}
	stream := &grpc.GenericClientStream[chunk, chunk]{ClientStream: opened}
	if err := sendArchive(stream, archive); err != nil {
		return nil, err
	}
	var imported []TransferredImage
	err = receiveJSON(stream.CloseAndRecv, &imported)
	return imported, err
}

// sendArchive ends without an error when the daemon does: the reason comes with
// its answer.
func sendArchive(stream *grpc.GenericClientStream[chunk, chunk], archive io.Reader) error {
	part := make([]byte, partSize)
	for {
		n, err := io.ReadFull(archive, part)
		if n > 0 {
			if err := stream.Send(&chunk{Value: part[:n]}); errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read archive: %w", err)
		}
	}
}

// Pull pulls an image and reports how far it is.
func (c ImageTransferClient) Pull(ctx context.Context, request TransferRequest, progress func(image.Progress)) (TransferredImage, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.ask(ctx, "Pull", request)
	if err != nil {
		return TransferredImage{}, err
	}
	for {
		var update TransferUpdate
		if err := receiveJSON(stream.Recv, &update); err != nil {
			return TransferredImage{}, err
		}
		if update.Image != nil {
			return *update.Image, nil
		}
		progress(*update.Progress)
	}
}

// Save writes an image as an archive.
func (c ImageTransferClient) Save(ctx context.Context, refOrID string, archive io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.ask(ctx, "Save", TransferRequest{Reference: refOrID})
	if err != nil {
		return err
	}
	_, err = io.Copy(archive, &chunkReader{receive: stream.Recv})
	return err
}

// Tag gives an image one more name.
func (c ImageTransferClient) Tag(ctx context.Context, refOrID, name string) error {
	_, err := c.describe(ctx, "Tag", TransferRequest{Reference: refOrID, Name: name})
	return err
}

// Untag removes one name of an image.
func (c ImageTransferClient) Untag(ctx context.Context, name string) error {
	_, err := c.describe(ctx, "Untag", TransferRequest{Reference: name})
	return err
}

// Describe describes an image.
func (c ImageTransferClient) Describe(ctx context.Context, refOrID string) (image.Description, error) {
	return c.describe(ctx, "Inspect", TransferRequest{Reference: refOrID})
}

func (c ImageTransferClient) describe(ctx context.Context, call string, request TransferRequest) (described image.Description, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.ask(ctx, call, request)
	if err == nil {
		err = receiveJSON(stream.Recv, &described)
	}
	return described, err
}

// ask opens a call that takes one request and answers with a stream, which ends
// with ctx.
func (c ImageTransferClient) ask(ctx context.Context, call string, request TransferRequest) (*grpc.GenericClientStream[chunk, chunk], error) {
	opened, err := c.Connection.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, "/"+transferService+"/"+call)
	if err != nil {
		return nil, err
	}
	stream := &grpc.GenericClientStream[chunk, chunk]{ClientStream: opened}
	if err := sendJSON(stream.Send, request); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return stream, stream.CloseSend()
}
