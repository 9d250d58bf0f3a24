package image

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

const someDigest = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"

// FuzzManifest: whatever passes has digests that are safe in a path, and sizes
// and numbers within the limits.
func FuzzManifest(f *testing.F) {
	f.Add([]byte(`{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"` + strings.Replace(someDigest, "4", "5", 1) + `","size":2},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"` + someDigest + `","size":7}]}`))
	f.Add([]byte(`{"config":{"digest":"sha256:../../etc/passwd","size":-1},"layers":null}`))
	f.Add([]byte(`{"artifactType":"x","config":{"mediaType":"application/vnd.oci.empty.v1+json","digest":"` + someDigest + `","size":2}}`))
	f.Add([]byte(`[]`))
	f.Add([]byte(`{"schemaVersion":2,"manifests":[{"digest":"` + someDigest + `","size":7}],"layers":[]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := parseIndex(data); err != nil && !errdefs.IsInvalidArgument(err) {
			t.Errorf("no kind: %v", err)
		}
		manifest, err := parseManifest(data)
		if err != nil {
			if !errdefs.IsInvalidArgument(err) && !errdefs.IsNotImplemented(err) {
				t.Errorf("no kind: %v", err)
			}
			return
		}
		if len(manifest.Layers) > maxLayers || manifest.Config.Size > maxConfig {
			t.Errorf("%d layers, a configuration of %d bytes", len(manifest.Layers), manifest.Config.Size)
		}
		for _, blob := range append(manifest.Layers, manifest.Config) {
			if !strings.HasPrefix(blob.Digest.String(), "sha256:") || strings.ContainsAny(blob.Digest.String(), "/.") || blob.Size <= 0 {
				t.Errorf("let in: %+v", blob)
			}
		}
	})
}

// FuzzConfiguration: what is read can be written and read again.
func FuzzConfiguration(f *testing.F) {
	f.Add([]byte(`{"os":"linux","architecture":"amd64","config":{"User":"1:2","Env":["A=b"],"Volumes":{"/v":{}}},"rootfs":{"type":"layers","diff_ids":["` + someDigest + `"]},"history":[{},{}]}`))
	f.Add([]byte(`{"rootfs":{"diff_ids":["sha256:../x"]}}`))
	f.Add([]byte(`{"config":null}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		spec, err := parseConfiguration(data)
		if err != nil {
			return
		}
		for _, id := range spec.RootFS.DiffIDs {
			if id.Validate() != nil {
				t.Errorf("let in: %q", id)
			}
		}
		uid, name := Image{UserText: spec.Config.User}.User()
		if uid == nil && name == "" && !strings.HasPrefix(spec.Config.User, ":") {
			t.Errorf("user %q is nothing", spec.Config.User)
		}
		if written, err := json.Marshal(spec); err != nil {
			t.Error(err)
		} else if _, err := parseConfiguration(written); err != nil {
			t.Errorf("read again: %v", err)
		}
	})
}

// FuzzDockerConfig: credentials are found without a panic, and never for a host
// that is not named.
func FuzzDockerConfig(f *testing.F) {
	f.Add([]byte(`{"auths":{"https://index.docker.io/v1/":{"auth":"dTpw"},"a.b:5000":{"username":"u","password":"p"}},"credsStore":"x"}`))
	f.Add([]byte(`{"auths":{"://%zz":{}}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "config.json")
		must(t, os.WriteFile(path, data, 0o600))
		config, err := readDockerConfig(path)
		if err != nil {
			return
		}
		for _, host := range []string{"docker.io", "a.b:5000"} {
			if auth, found := config.lookup(host); found {
				_, _, _ = auth.login()
			}
		}
		shown := credentials{registry: "docker.io", config: config}
		if auth, err := shown.forHost(t.Context(), "docker.io"); auth != (Auth{}) || err != nil {
			t.Errorf("a host that the pull does not own was shown %#v: %v", auth, err)
		}
	})
}
