package image

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/minicri/minicri/test/harness"
)

// A login in an address of hosts.toml is ignored, as the library does, and is in no error, log or report.
func TestLoginsInAddresses(t *testing.T) {
	const user, password = "robot", "ho5ts-t0ml"
	basic := func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		return status(http.StatusUnauthorized, nil, "WWW-Authenticate", `Basic realm="r"`)(w, r, nil)
	}
	for _, test := range []struct {
		name, hosts string // USER is the login, HOST the registry
		fault       faultFunc
		words       string // in the error; "" if the pull succeeds
	}{
		{"server", `server = "http://USER@HOST"`, nil, ""},
		{"mirror", "server = \"http://127.0.0.1:1\"\n[host.\"http://USER@HOST\"]", nil, ""},
		{"a user alone", `server = "http://robot@HOST"`, nil, ""},
		{"refused", `server = "http://USER@HOST"`, basic, "requires credentials"},
		{"failing", `server = "http://USER@HOST"`, status(http.StatusInternalServerError, nil), "the registry failed"},
		{"dead", `server = "http://USER@127.0.0.1:1"`, nil, "connection refused"},
		{"wrong scheme", "server = \"https://USER@HOST\"\nskip_verify = false", nil, `set server = "http://127`},
		{"an @ in the password", `server = "http://robot:x@ho5ts-t0ml@HOST"`, nil, ""},
		{"a slash in the password", `server = "http://robot:x/ho5ts-t0ml@HOST"`, nil, "registry configuration"},
		{"an unknown key", "[host.\"http://USER@HOST\"]\nskip = true", nil, "there is no such key"},
		{"a wrong value", "[host.\"http://USER@HOST\"]\nskip_verify = \"x\"", nil, "skip_verify"},
	} {
		t.Run(test.name, func(t *testing.T) {
			certs, log, registry := t.TempDir(), &lockedText{}, newTestRegistry(t)
			logger := slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
			s := openStore(t, func(c *Config) { c.CertsDirs, c.Logger = []string{certs}, logger })
			registry.push(t, "app:1", smallImage(t))
			registry.breakWith(test.fault)
			login := strings.NewReplacer("USER", user+":"+password, "HOST", registry.host())
			writeHosts(t, certs, "registry.example", login.Replace(test.hosts)+"\n")
			_, err := s.Pull(t.Context(), "registry.example/app:1", Auth{}, nil)
			if test.words != "" {
				harness.WantError(t, err, test.words)
			} else if test.fault == nil {
				harness.Check(t, err)
			}
			shown := fmt.Sprint(err, errors.Join(CheckRegistries([]string{certs}, "", "")...), log)
			harness.Want(t, !strings.Contains(shown, password), "the password is shown: %s", shown)
			logins := registry.seen(func(r seenRequest) bool { return r.authorization != "" })
			harness.Want(t, len(logins) == 0, "the registry got a login: %v", logins)
		})
	}
}

// Platforms of images without an index: builders write their own. A Windows image has no program for Linux.
func TestPlatformsWithoutAnIndex(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	for _, test := range []struct{ os, arch, rootfs, refused string }{
		{"linux", "s390x", "layers", ""},
		{"Linux", "x86_64", "layers", ""},
		{"darwin", "arm64", "layers", ""},
		{"", "", "", ""},
		{"windows", "amd64", "layers", "the image is for windows/amd64"},
		{"linux", nodePlatformArch(), "other", `rootfs is of type "other"`},
	} {
		img := imageOf(t, v1.Config{}, layerOf(t, file("a", test.os+test.arch)))
		spec, err := img.ConfigFile()
		must(t, err)
		spec = spec.DeepCopy()
		spec.OS, spec.Architecture, spec.RootFS.Type = test.os, test.arch, test.rootfs
		img, err = mutate.ConfigFile(img, spec)
		must(t, err)
		_, err = s.Pull(t.Context(), registry.push(t, "single:1", img), Auth{}, nil)
		if test.refused != "" {
			harness.WantError(t, err, test.refused)
		} else {
			harness.Want(t, err == nil, "%+v: %v", test, err)
		}
	}
}
