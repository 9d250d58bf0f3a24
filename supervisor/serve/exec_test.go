package serve

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/bundle"
	"github.com/minicri/minicri/test/harness"
)

// An exec takes the lowest free name, and tries one name of those that earlier execs have left something in.
func TestNamesOfExecCgroups(t *testing.T) {
	c := (&Supervisor{dir: t.TempDir()}).newContainer(record{Container: bundle.Container{ID: "c"}})
	cgroup := t.TempDir()
	c.record.Cgroups = bundle.Cgroups{"pids": cgroup}
	harness.Check(t, os.MkdirAll(c.record.Dir(), 0o700))
	left := func(g *execCgroup) string { return filepath.Join(cgroup, g.sub, "cgroup.procs") }
	first, second := c.newExecCgroup(), c.newExecCgroup()
	names := []string{first.sub, second.sub}
	harness.Same(t, "names", names, []string{"minicri-exec-0-c.mount", "minicri-exec-1-c.mount"})
	for _, g := range []*execCgroup{first, second} {
		harness.Check(t, os.WriteFile(left(g), []byte("1\n"), 0o600))
		c.endSlot(g.slot, true)
	}
	harness.Check(t, os.Remove(left(second)))
	third := c.newExecCgroup()
	harness.Want(t, third.slot == 1 || third.slot == 2, "%s", third.sub)
	fourth := c.newExecCgroup()
	harness.Same(t, "names", third.slot+fourth.slot, 3)
	_, err := os.Stat(left(first))
	harness.Want(t, err == nil && !c.slots[0], "the background process is gone: %v", err)
	harness.Check(t, os.Remove(left(first)))
	harness.Same(t, "a name that is free again", c.newExecCgroup().slot, 0)
}

// A creation that its caller has given up and deleted is refused, in whichever order the requests are handled.
func TestCreationThatADeletionHasOvertaken(t *testing.T) {
	s := &Supervisor{dir: t.TempDir(), containers: map[string]*container{}}
	create := func(id string) error {
		_, err := s.create(t.Context(), &api.CreateRequest{Id: id, Bundle: s.dir})
		return err
	}
	for i := range 2 * maxDeleted {
		_, err := service{s}.Delete(t.Context(), &api.DeleteRequest{Id: fmt.Sprint(i), Kill: true})
		harness.Want(t, errdefs.IsNotFound(err), "the deletion of nothing: %v", err)
	}
	for i := range maxDeleted {
		err := create(fmt.Sprint(maxDeleted + i))
		harness.Want(t, errdefs.IsAborted(err), "the creation: %v", err)
	}
	harness.Same(t, "ids", len(s.deleted), maxDeleted)
	err := create("another") // there is no bundle
	harness.Want(t, errdefs.IsInvalidArgument(err) && len(s.containers) == 0, "another creation: %v", err)
}

// The list of any number of containers that could not start fits into a message.
//
// attack: denial of service: 8,000 containers fail to start with an error of 1 KiB each
// held: the errors in the supervisor's list are shortened, and the list fits into one message
func TestListOfStartErrors(t *testing.T) {
	var list api.ListResponse
	for range 8000 {
		exit := &api.Exit{StartError: strings.Repeat("é", maxStartError/2), Code: 128}
		list.Containers = append(list.Containers, &api.Container{Id: strings.Repeat("a", 64), Exit: exit})
	}
	boundErrors(list.Containers)
	text := list.Containers[0].Exit.StartError
	size := proto.Size(&list)
	harness.Want(t, size < 4<<20, "%d bytes, %q", size, text)
	harness.Want(t, utf8.ValidString(text), "%d bytes, %q", size, text)
	harness.Want(t, len(text) >= 100, "%d bytes, %q", size, text)
	few := []*api.Container{{Exit: &api.Exit{StartError: "short"}}, {}}
	boundErrors(few)
	harness.Same(t, "one error", few[0].Exit.StartError, "short")
}
