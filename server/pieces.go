package server

import "google.golang.org/protobuf/proto"

// pieceBytes is the size at which a message of a stream is sent: far below
// every limit of gRPC, and large enough for some hundred pods.
const pieceBytes = 1 << 20

// sendPieces sends a list in messages that are cut by size: a pod's annotations
// may be as large as a thousand other pods. An object that is larger than a
// piece is sent alone.
func sendPieces[T proto.Message](list []T, send func([]T) error) error {
	begin, size := 0, 0
	for i, object := range list {
		next := proto.Size(object)
		if i > begin && size+next > pieceBytes {
			if err := send(list[begin:i]); err != nil {
				return err
			}
			begin, size = i, 0
		}
		size += next
	}
	if begin == len(list) {
		return nil
	}
	return send(list[begin:])
}
