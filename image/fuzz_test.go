package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/containerd/errdefs"
	"github.com/pelletier/go-toml/v2"

	"github.com/minicri/minicri/test/harness"
)

const someDigest = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"

// FuzzManifest: whatever passes has digests that are safe in a path, and sizes and numbers within the limits.
func FuzzManifest(f *testing.F) {
	f.Add([]byte(`{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"` + strings.Replace(someDigest, "4", "5", 1) + `","size":2},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"` + someDigest + `","size":7}]}`))
	f.Add([]byte(`{"config":{"digest":"sha256:../../etc/passwd","size":-1},"layers":null}`))
	f.Add([]byte(`{"artifactType":"x","config":{"mediaType":"application/vnd.oci.empty.v1+json","digest":"` + someDigest + `","size":2}}`))
	f.Add([]byte(`[]`))
	f.Add([]byte(`{"schemaVersion":2,"manifests":[{"digest":"` + someDigest + `","size":7}],"layers":[]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		err := parseIndex(data)
		harness.Want(t, err == nil || errdefs.IsInvalidArgument(err), "no kind: %v", err)
		manifest, err := parseManifest(data)
		if err != nil {
			harness.Want(t, errdefs.IsInvalidArgument(err) || errdefs.IsNotImplemented(err), "no kind: %v", err)
			return
		}
		harness.Want(t, len(manifest.Layers) <= maxLayers && manifest.Config.Size <= maxConfig,
			"%d layers, a configuration of %d bytes", len(manifest.Layers), manifest.Config.Size)
		for _, blob := range append(manifest.Layers, manifest.Config) {
			harness.Want(t, strings.HasPrefix(blob.Digest.String(), "sha256:") && !strings.ContainsAny(blob.Digest.String(), "/.") && blob.Size > 0,
				"let in: %+v", blob)
		}
	})
}

// FuzzHosts: the library takes every host of a file that is accepted.
func FuzzHosts(f *testing.F) {
	for _, spoilt := range spoiltHosts {
		f.Add([]byte(spoilt.text))
	}
	f.Add([]byte("server = \"a.example\"\nca = [\"x\"]\n[host.\"https://b.example\"]\nclient = [[\"x\", \"y\"]]\n[host.\"c.example\".header]\na = \"b\"\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if checkHosts(data) != nil || len(data) == 0 {
			return
		}
		var file hostsFile
		must(t, toml.Unmarshal(data, &file))
		certs := t.TempDir()
		must(t, os.WriteFile(filepath.Join(certs, hostsFileName), data, 0o600))
		hosts, err := config.ConfigureHosts(t.Context(), config.HostOptions{HostDir: func(string) (string, error) { return certs, nil }})("a.example")
		harness.Want(t, err != nil || len(hosts) >= len(file.Hosts)+1, "%d of %d hosts were taken", len(hosts), len(file.Hosts)+1)
	})
}
