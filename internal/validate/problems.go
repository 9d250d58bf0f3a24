// Package validate checks what the CRI asks for before anything is done about
// it. Pod, Container and Resources report everything that is wrong with a
// request at once, each with the name of its field in the API, as one error of
// the kind errdefs.ErrInvalidArgument. They have no side effects; apart from
// profiles that a request names by their files, they read nothing but the
// request and what they are given. There is no state, and no lock.
package validate

import (
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// problems collects what is wrong with one request.
type problems struct{ errs []error }

func (p *problems) bad(field, format string, args ...any) {
	p.errs = append(p.errs, fmt.Errorf("%s: %w", field, fmt.Errorf(format, args...)))
}

func (p *problems) err() error {
	if len(p.errs) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, errors.Join(p.errs...))
}

// longestName is the longest name that Kubernetes gives to anything.
const longestName = 253

func (p *problems) text(field, text string) {
	if strings.ContainsRune(text, 0) {
		p.bad(field, "has a NUL character")
	}
}

// mostText bounds all labels, and all annotations, of a pod or a container: they are
// in every list, which a message of gRPC has to hold. It is twice what the API server
// takes of annotations (TotalAnnotationSizeLimitB): the kubelet adds its own.
const mostText = 512 << 10

// texts: labels and annotations are stored as they are, but they are text.
func (p *problems) texts(field string, pairs map[string]string) {
	size := 0
	for key, value := range pairs {
		size += len(key) + len(value)
		if !utf8.ValidString(key) || !utf8.ValidString(value) {
			p.bad("config."+field, "%q is not UTF-8", key)
		}
	}
	if size > mostText {
		p.bad("config."+field, "keys and values have %d bytes together, more than %d", size, mostText)
	}
}

// absolute: a place that does not lead back up.
func (p *problems) absolute(field, name string) {
	p.place(field, name)
	if slices.Contains(strings.Split(name, "/"), "..") {
		p.bad(field, "%q has an element '..'", name)
	}
}

// place: one in a container may lead back up. It is cleaned, and nothing is above /.
func (p *problems) place(field, name string) {
	if !path.IsAbs(name) {
		p.bad(field, "%q is not an absolute path", name)
	}
	p.text(field, name)
}

func (p *problems) mode(field string, mode runtimeapi.NamespaceMode, allowed ...runtimeapi.NamespaceMode) {
	if !slices.Contains(allowed, mode) {
		p.bad(field, "%v is not one of %v", mode, allowed)
	}
}

func (p *problems) id(field string, id *runtimeapi.Int64Value) {
	// The highest value means "no change" to the kernel (setresuid(2)).
	if id != nil && (id.GetValue() < 0 || id.GetValue() >= math.MaxUint32) {
		p.bad(field, "%d is not a user or group id", id.GetValue())
	}
}

// posixID: half of the ids are not taken by the programs that read /etc/passwd.
func (p *problems) posixID(field string, id int64) {
	if id < 0 || id > math.MaxInt32 {
		p.bad(field, "%d is not a user or group id", id)
	}
}

func (p *problems) idRanges(field string, mappings []*runtimeapi.IDMapping) {
	for i, m := range mappings {
		if m.GetLength() == 0 {
			p.bad(field, "mapping %d is empty", i)
		}
		if uint64(m.GetHostId())+uint64(m.GetLength()) > math.MaxUint32 || uint64(m.GetContainerId())+uint64(m.GetLength()) > math.MaxUint32 {
			p.bad(field, "mapping %d goes beyond the highest id", i)
		}
	}
}

// known: a value of an enumeration that the API of this build has.
func known[E ~int32](p *problems, field string, names map[int32]string, value E) {
	if _, is := names[int32(value)]; !is {
		p.bad(field, "%d is unknown", value)
	}
}

// notWindows: what is meant for Windows would have no effect here.
func (p *problems) notWindows(field string, set bool) {
	if set {
		p.bad(field, "is set, but this node runs Linux")
	}
}
