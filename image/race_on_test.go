//go:build race

package image

// maxDecoder is how much a decoder of zstd may take, in KiB: the race detector keeps
// more than as much again for what is looked at.
const maxDecoder = 640 << 10
