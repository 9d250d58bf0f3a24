//go:build !race

package image

// maxDecoder is how much a decoder of zstd may take, in KiB.
const maxDecoder = 192 << 10
