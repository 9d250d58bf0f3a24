package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/minicri/minicri/image"
)

// The CRI has no call to bring an archive to a node and none that tells how far
// a pull is. This service, beside the CRI on the same socket, has both; it is
// for `minicri image` alone. Its messages are bytes: parts of an archive, or
// JSON.
//
//	Import(stream part of the archive) returns ([]TransferredImage)
//	Pull(TransferRequest) returns (stream TransferNews)
const transferService = "minicri.v1.ImageTransfer"

// TransferRequest asks for a pull.
type TransferRequest struct {
	Reference string
	Auth      image.Auth
}

// TransferNews is either progress or, last, the image.
type TransferNews struct {
	Progress *image.Progress   `json:",omitempty"`
	Image    *TransferredImage `json:",omitempty"`
}

// TransferredImage is an image that was pulled or imported.
type TransferredImage struct {
	ID   string
	Tags []string
	Size int64
}

// Transfers is what the transfer service asks of the image store.
type Transfers interface {
	Import(ctx context.Context, archive io.Reader) ([]image.Image, error)
	Pull(ctx context.Context, reference string, auth image.Auth, progress func(image.Progress)) (image.Image, error)
}

type chunk = wrapperspb.BytesValue

// RegisterImageTransfer serves pulls with progress and imports.
func RegisterImageTransfer(registrar grpc.ServiceRegistrar, transfers Transfers) {
	registrar.RegisterService(&grpc.ServiceDesc{
		ServiceName: transferService,
		HandlerType: (*Transfers)(nil),
		Streams: []grpc.StreamDesc{
			{StreamName: "Import", ClientStreams: true, Handler: func(_ any, stream grpc.ServerStream) error {
				return serveImport(transfers, &grpc.GenericServerStream[chunk, chunk]{ServerStream: stream})
			}},
			{StreamName: "Pull", ServerStreams: true, Handler: func(_ any, stream grpc.ServerStream) error {
				return servePull(transfers, &grpc.GenericServerStream[chunk, chunk]{ServerStream: stream})
			}},
		},
	}, transfers)
}

func serveImport(transfers Transfers, stream *grpc.GenericServerStream[chunk, chunk]) error {
	imported, err := transfers.Import(stream.Context(), &chunkReader{receive: stream.Recv})
	if err != nil {
		return err
	}
	all := make([]TransferredImage, len(imported))
	for i, one := range imported {
		all[i] = transferred(one)
	}
	return sendJSON(stream.SendAndClose, all)
}

// servePull leaves progress out while the client does not take it: a pull never
// waits for the one who watches it.
func servePull(transfers Transfers, stream *grpc.GenericServerStream[chunk, chunk]) error {
	var request TransferRequest
	if err := receiveJSON(stream.Recv, &request); err != nil {
		return err
	}
	news, done := make(chan image.Progress, 256), make(chan error, 1)
	go func() { done <- sendProgress(stream, news) }()
	pulled, err := transfers.Pull(stream.Context(), request.Reference, request.Auth, func(p image.Progress) {
		select {
		case news <- p:
		default:
		}
	})
	close(news)
	if sendErr := <-done; err == nil {
		err = sendErr
	}
	if err != nil {
		return err
	}
	last := transferred(pulled)
	return sendJSON(stream.Send, TransferNews{Image: &last})
}

func sendProgress(stream *grpc.GenericServerStream[chunk, chunk], news <-chan image.Progress) (err error) {
	for p := range news {
		if err == nil {
			err = sendJSON(stream.Send, TransferNews{Progress: &p})
		}
	}
	return err
}

func transferred(i image.Image) TransferredImage {
	return TransferredImage{ID: i.ID, Tags: i.RepoTags, Size: i.Size}
}

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

// Pull pulls an image and tells how far it is.
func (c ImageTransferClient) Pull(ctx context.Context, request TransferRequest, progress func(image.Progress)) (TransferredImage, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	opened, err := c.Connection.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, "/"+transferService+"/Pull")
	if err != nil {
		return TransferredImage{}, err
	}
	stream := &grpc.GenericClientStream[chunk, chunk]{ClientStream: opened}
	if err := sendJSON(stream.Send, request); err != nil && !errors.Is(err, io.EOF) {
		return TransferredImage{}, err
	}
	if err := stream.CloseSend(); err != nil {
		return TransferredImage{}, err
	}
	for {
		var news TransferNews
		if err := receiveJSON(stream.Recv, &news); err != nil {
			return TransferredImage{}, err
		}
		if news.Image != nil {
			return *news.Image, nil
		}
		progress(*news.Progress)
	}
}

func sendJSON(send func(*chunk) error, value any) error {
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return send(&chunk{Value: data})
}

func receiveJSON(receive func() (*chunk, error), value any) error {
	message, err := receive()
	if err != nil {
		return err
	}
	return json.Unmarshal(message.GetValue(), value)
}

// chunkReader reads the parts of an archive as one.
type chunkReader struct {
	receive func() (*chunk, error)
	rest    []byte
}

func (r *chunkReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		message, err := r.receive()
		if err != nil {
			return 0, err
		}
		r.rest = message.GetValue()
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}
