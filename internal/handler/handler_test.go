package handler

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// Programs that hang, flood, die or say rubbish do not hold up the status of the
// node, and each is named with what is wrong; a good one is believed beside them.
func TestListOfHostilePrograms(t *testing.T) {
	dir := t.TempDir()
	programs := map[string]string{
		"good":   `echo '{"ociVersionMin": "1.0.0", "ociVersionMax": "1.2.0", "mountOptions": ["rro"], "linux": {"netDevices": {"enabled": true}, "memoryPolicy": {"modes": ["MPOL_BIND"]}}}'`,
		"old":    `test "$1" = --version`,
		"hangs":  `sleep 1000 & echo $! >>$0.children; wait`,
		"flood":  `head -c 100000000 /dev/zero; exit 1`,
		"dies":   `echo it is broken >&2; exit 3`,
		"mute":   "exit 3",
		"leaves": `sleep 30 & echo '{"ociVersionMin": "1.0.0", "mountOptions": ["rro"]}'`,
		"none":   "",
	}
	specs := make(map[string]Spec)
	for name, script := range programs {
		path := filepath.Join(dir, name)
		specs[name] = Spec{Runtime: []string{path}}
		if script == "" {
			continue
		}
		harness.Check(t, os.WriteFile(path, []byte(fmt.Sprintf("#!/bin/sh\n%s\n", script)), 0o755))
	}
	s := New(specs, Features{RecursiveReadOnlyMounts: true, UserNamespaces: true})
	list := make(map[string]Status)
	harness.Eventually(t, "those that answer are seen, and the one that hangs", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		for _, h := range s.List(ctx) {
			list[h.Name] = h
		}
		cancel()
		return list["good"].Err == nil && list["old"].Err == nil && list["leaves"].Err == nil && strings.Contains(fmt.Sprint(list["hangs"].Err), "no answer")
	})
	for _, h := range s.List(t.Context()) {
		list[h.Name] = h
	}
	for name, says := range harness.Sorted(map[string]string{"hangs": "hangs --version: no answer", "dies": "it is broken", "mute": "exit status 3", "none": "is not there", "flood": "flood --version"}) {
		if err := list[name].Err; err == nil || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), `""`) || len(err.Error()) > 2000 {
			t.Errorf("%s: %.2000v, want an error that says %q", name, err, says)
		}
	}
	for _, h := range New(specs, Features{}).List(t.Context()) { // asks anew
		if h.Name == "hangs" {
			harness.WantError(t, h.Err, "no answer")
		}
	}
	for child := range strings.FieldsSeq(string(harness.Read(t, filepath.Join(dir, "hangs.children")))) {
		harness.Eventually(t, "what a program has started that hangs is ended", func() bool {
			_, err := os.Stat("/proc/" + child)
			return err != nil
		})
	}
	for name, has := range harness.Sorted(map[string]func(Features) bool{
		"good": func(f Features) bool {
			return f.RecursiveReadOnlyMounts && !f.UserNamespaces && f.NetDevices && f.MemoryPolicy
		},
		"leaves": func(f Features) bool { return f.RecursiveReadOnlyMounts }, "old": func(f Features) bool { return f == Features{} },
		"": func(f Features) bool { return f.UserNamespaces }, // the builtin one
	}) {
		harness.Want(t, list[name].Err == nil && has(list[name].Features), "%q: %+v", name, list[name])
	}
}
