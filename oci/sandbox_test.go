package oci

import (
	"fmt"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/test/harness"
)

// A seccomp profile is in sandbox.json by its name alone: see seccomp_test.go.
func TestForSandbox(t *testing.T) {
	for name, part := range map[string]func(*specs.Spec) any{
		"sandbox":  func(s *specs.Spec) any { return s },
		"apparmor": func(s *specs.Spec) any { return s.Process.ApparmorProfile },
		"user":     func(s *specs.Spec) any { return s.Process.User },
		"seccomp":  func(s *specs.Spec) any { return s.Linux.Seccomp },
		"sysctl":   func(s *specs.Spec) any { return s.Linux.Sysctl },
		"namespaces": func(s *specs.Spec) any {
			return struct {
				Hostname   string                 `json:"hostname,omitempty"`
				Namespaces []specs.LinuxNamespace `json:"namespaces"`
			}{s.Hostname, s.Linux.Namespaces}
		},
	} {
		t.Run(name, func(t *testing.T) { goldenSandboxes(t, name, part) })
	}
}

// FuzzPasswd: the files of an image name no user or group whose number is not one, and a number in the image's
// configuration stays that number. They give nobody more groups than a process can have.
func FuzzPasswd(f *testing.F) {
	f.Add("web:www", []byte("root:x:0:0::/root:/bin/sh\nweb:x:1000:1000::/:/bin/sh\n"), []byte("www:x:5:web\nextra:x:6:web\n"))
	f.Add("1000", []byte("1000:x:0:0::/:\n"), []byte(""))
	f.Add("u", []byte("u:x:4294967296:-1::/:\n"), []byte("u:x:99999999999999999999:u\n"))
	var groups []byte
	for group := range 70_000 {
		groups = fmt.Appendf(groups, "g:x:%d:u\n", group)
	}
	f.Add("u", []byte("u:x:1:1::/:\n"), groups)
	f.Add(":", []byte(":::::::\n::\n"), []byte("\x00:\n"))
	f.Fuzz(func(t *testing.T, wanted string, passwd, group []byte) {
		c := &Container{Image: Image{User: wanted}, Passwd: passwd, Group: group}
		user, err := ProcessUser(c)
		harness.Want(t, err != nil || len(user.AdditionalGids) <= 1<<16, "user %q has %d groups", wanted, len(user.AdditionalGids))
		found, err := lookUp(c, wanted)
		if err != nil {
			return
		}
		for _, id := range append(found.Sgids, found.Uid, found.Gid) {
			harness.Want(t, id >= 0 && id <= 1<<31-1, "user %q has the id %d", wanted, id)
		}
		harness.Want(t, wanted != "1000" || found.Uid == 1000, "user 1000 is %d", found.Uid)
	})
}
