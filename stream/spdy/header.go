package spdy

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/adler32"
	"io"
	"net/http"
)

const (
	// maxHeaders and maxField bound what headers are when they are decompressed:
	// streams of exec and port-forward have three, of some ten bytes.
	maxHeaders = 16
	maxField   = 4 << 10
	// maxRest is what a block may have behind its last header: the end of a
	// deflate block.
	maxRest = 16
)

// headerReader decompresses the header blocks of a connection, which are one
// stream of zlib.
type headerReader struct {
	block        bytes.Buffer
	decompressor io.Reader
}

// read parses a block (2.6.10).
func (h *headerReader) read(block []byte) (http.Header, error) {
	h.block.Write(block)
	if h.decompressor == nil {
		reader, err := zlib.NewReaderDict(&h.block, dictionary())
		if err != nil {
			return nil, err
		}
		h.decompressor = reader
	}
	count, err := h.number()
	if err != nil {
		return nil, err
	}
	if count > maxHeaders {
		return nil, fmt.Errorf("%d headers: the limit is %d", count, maxHeaders)
	}
	header := make(http.Header)
	for range count {
		name, err := h.field()
		if err != nil {
			return nil, err
		}
		value, err := h.field()
		if err != nil {
			return nil, err
		}
		header.Set(name, value)
	}
	if h.block.Len() > maxRest {
		return nil, fmt.Errorf("%d bytes behind the headers", h.block.Len())
	}
	return header, nil
}

func (h *headerReader) number() (uint32, error) {
	var number [4]byte
	if _, err := io.ReadFull(h.decompressor, number[:]); err != nil {
		return 0, truncated(err)
	}
	return binary.BigEndian.Uint32(number[:]), nil
}

func (h *headerReader) field() (string, error) {
	length, err := h.number()
	if err != nil {
		return "", err
	}
	if length > maxField {
		return "", fmt.Errorf("a header of %d bytes: the limit is %d", length, maxField)
	}
	field := make([]byte, length)
	if _, err := io.ReadFull(h.decompressor, field); err != nil {
		return "", truncated(err)
	}
	return string(field), nil
}

// truncated: the end of a block in the middle of a header is no end of the
// connection.
func truncated(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// emptyHeaders are the compressed headers of a reply, of which there are none: a
// stored block of deflate (RFC 1951, 3.2.4) with the number 0, and an empty one,
// at which decompressors return what they have. The first reply of a
// connection has zlib's own header before it (RFC 1950, 2.2).
func emptyHeaders(first bool) []byte {
	var block []byte
	if first {
		block = append(block, 0x78, 0xbb) // deflate, 32 KiB, with a dictionary
		block = binary.BigEndian.AppendUint32(block, adler32.Checksum(dictionary()))
	}
	return append(block, 0, 4, 0, 0xfb, 0xff, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff)
}
