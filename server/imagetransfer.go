package server

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/minicri/minicri/image"
)

// The CRI has no call to bring an archive to a node or to take one from it, none
// that names an image, and none that reports how far a pull is. This service has
// them, on the CRI's socket; it is for `minicri image` alone. Its messages are
// bytes: parts of an archive, or JSON.
//
//	Import(stream part of the archive) returns ([]TransferredImage)
//	Pull(TransferRequest) returns (stream TransferUpdate)
//	Save(TransferRequest) returns (stream part of the archive)
//	Tag, Untag, Inspect(TransferRequest) returns (image.Description)
const transferService = "minicri.v1.ImageTransfer"

// TransferRequest asks for something to be done with an image.
type TransferRequest struct {
	Reference string
	Auth      image.Auth // of a pull
	Platform  string     // of a pull: os/arch[/variant]; empty is the node's
	Name      string     // that Tag gives
}

// TransferUpdate is either progress or, last, the image.
type TransferUpdate struct {
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
	PullFor(ctx context.Context, reference, platform string, auth image.Auth, progress func(image.Progress)) (image.Image, error)
	Save(ctx context.Context, refOrID string, archive io.Writer) error
	Tag(ctx context.Context, refOrID, name string) (image.Image, error)
	Untag(ctx context.Context, name string) error
	Describe(ctx context.Context, refOrID string) (image.Description, error)
}

type chunk = wrapperspb.BytesValue

// transferStream is the daemon's end of a call.
type transferStream = *grpc.GenericServerStream[chunk, chunk]

// RegisterImageTransfer serves the calls that are named above.
func RegisterImageTransfer(registrar grpc.ServiceRegistrar, transfers Transfers) {
	description := &grpc.ServiceDesc{ServiceName: transferService, HandlerType: (*Transfers)(nil)}
	for name, serve := range map[string]func(Transfers, transferStream) error{
		"Import": serveImport, "Pull": servePull, "Save": serveSave, "Tag": serveTag, "Untag": serveUntag, "Inspect": serveInspect,
	} {
		description.Streams = append(description.Streams, grpc.StreamDesc{
			StreamName: name, ClientStreams: name == "Import", ServerStreams: name != "Import",
			Handler: func(_ any, stream grpc.ServerStream) error {
				return serve(transfers, &grpc.GenericServerStream[chunk, chunk]{ServerStream: stream})
			},
		})
	}
	registrar.RegisterService(description, transfers)
}

func serveImport(transfers Transfers, stream transferStream) error {
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
// waits for the client that watches it.
func servePull(transfers Transfers, stream transferStream) error {
	var request TransferRequest
	if err := receiveJSON(stream.Recv, &request); err != nil {
		return err
	}
	updates, done := make(chan image.Progress, 256), make(chan error, 1)
	go func() { done <- sendProgress(stream, updates) }()
	pulled, err := transfers.PullFor(stream.Context(), request.Reference, request.Platform, request.Auth, func(p image.Progress) {
		select {
		case updates <- p:
		default:
		}
	})
	close(updates)
	if sendErr := <-done; err == nil {
		err = sendErr
	}
	if err != nil {
		return err
	}
	last := transferred(pulled)
	return sendJSON(stream.Send, TransferUpdate{Image: &last})
}

func sendProgress(stream transferStream, updates <-chan image.Progress) (err error) {
	for p := range updates {
		if err == nil {
			err = sendJSON(stream.Send, TransferUpdate{Progress: &p})
		}
	}
	return err
}

func serveSave(transfers Transfers, stream transferStream) error {
	var request TransferRequest
	if err := receiveJSON(stream.Recv, &request); err != nil {
		return err
	}
	parts := bufio.NewWriterSize(chunkWriter{stream.Send}, partSize)
	if err := transfers.Save(stream.Context(), request.Reference, parts); err != nil {
		return err
	}
	return parts.Flush()
}

func serveTag(transfers Transfers, stream transferStream) error {
	var request TransferRequest
	if err := receiveJSON(stream.Recv, &request); err != nil {
		return err
	}
	if _, err := transfers.Tag(stream.Context(), request.Reference, request.Name); err != nil {
		return err
	}
	return sendDescription(transfers, stream, request.Name)
}

func serveUntag(transfers Transfers, stream transferStream) error {
	var request TransferRequest
	if err := receiveJSON(stream.Recv, &request); err != nil {
		return err
	}
	if err := transfers.Untag(stream.Context(), request.Reference); err != nil {
		return err
	}
	return sendJSON(stream.Send, image.Description{})
}

func serveInspect(transfers Transfers, stream transferStream) error {
	var request TransferRequest
	if err := receiveJSON(stream.Recv, &request); err != nil {
		return err
	}
	return sendDescription(transfers, stream, request.Reference)
}

func sendDescription(transfers Transfers, stream transferStream, refOrID string) error {
	described, err := transfers.Describe(stream.Context(), refOrID)
	if err != nil {
		return err
	}
	return sendJSON(stream.Send, described)
}

func transferred(i image.Image) TransferredImage {
	return TransferredImage{ID: i.ID, Tags: i.RepoTags, Size: i.Size}
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

// chunkWriter sends each write as a part of an archive.
type chunkWriter struct{ send func(*chunk) error }

func (w chunkWriter) Write(p []byte) (int, error) {
	if err := w.send(&chunk{Value: p}); err != nil {
		return 0, err
	}
	return len(p), nil
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
