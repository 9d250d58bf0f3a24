package main

import (
	"bytes"
	"fmt"
	"io"
	"log"
	"math/rand"
	"net/http/httptest"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/minicri/minicri/test/bench/contender"
	hostile "github.com/minicri/minicri/test/hostile/registry"
)

// serveRegistry serves a registry in memory.
func serveRegistry() (host string, stop func()) {
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	return server.Listener.Addr().String(), server.Close
}

func push(host, path string, img v1.Image) (reference string) {
	reference = host + "/" + path
	contender.Check(remote.Write(contender.Must(name.ParseReference(reference, name.Insecure)), img))
	return reference
}

const (
	layers        = 8
	filesPerLayer = 1500
	bytesPerFile  = 16 << 10 // half of them do not compress
)

// pushBigImage pushes the image that is pulled, always the same bytes.
func pushBigImage(host string) (reference string) {
	var all []v1.Layer
	size := int64(0)
	for i := range layers {
		var files []hostile.Entry
		random := rand.New(rand.NewSource(int64(i)))
		for k := range filesPerLayer {
			data := bytes.Repeat(fmt.Appendf(nil, "line %d of a text\n", k), bytesPerFile)[:bytesPerFile]
			random.Read(data[:bytesPerFile/2])
			files = append(files, hostile.File(fmt.Sprintf("usr/lib/part%d/dir%d/file%d", i, k/50, k), 0o644, string(data)))
		}
		all = append(all, contender.LayerOf(files...))
		size += contender.Must(all[i].Size())
	}
	fmt.Printf("image: %d layers, %d files, %d MB compressed, %d MB unpacked\n",
		layers, layers*filesPerLayer, size/1e6, layers*filesPerLayer*bytesPerFile/1_000_000)
	return push(host, "bench/big:1", contender.ImageOf(label("big"), all...))
}
