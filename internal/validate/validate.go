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
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
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

const (
	// longestName is the longest name that Kubernetes gives to anything.
	longestName = 253
	// mostText bounds all labels, and all annotations, of a pod or a container: they are
	// in every list, which a message of gRPC has to hold. It is twice what the API server
	// takes of annotations (TotalAnnotationSizeLimitB): the kubelet adds its own.
	mostText = 512 << 10

	// The highest id means "no change" to the kernel (setresuid(2)); the programs that
	// read /etc/passwd take half of the ids.
	lastID, lastPosixID = math.MaxUint32 - 1, math.MaxInt32

	securityContext = "config.linux.security_context."
	namespaceField  = securityContext + "namespace_options."
)

// form checks what holds for the fields of every message: texts have no NUL, labels and
// annotations are UTF-8, enumerations have values that the API of this build knows, and
// nothing is for Windows.
func (p *problems) form(prefix string, message protoreflect.Message) {
	message.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		field := prefix + string(f.Name())
		switch {
		case f.Name() == "windows":
			p.bad(field, "is set, but this node runs Linux")
		case f.IsMap():
			p.pairs(field, f, v.Map())
		case f.IsList():
			for i := range v.List().Len() {
				p.value(fmt.Sprintf("%s[%d]", field, i), f, v.List().Get(i))
			}
		default:
			p.value(field, f, v)
		}
		return true
	})
}

func (p *problems) value(field string, f protoreflect.FieldDescriptor, v protoreflect.Value) {
	switch f.Kind() {
	case protoreflect.MessageKind:
		p.form(field+".", v.Message())
	case protoreflect.EnumKind:
		if f.Enum().Values().ByNumber(v.Enum()) == nil {
			p.bad(field, "%d is unknown", v.Enum())
		}
	case protoreflect.StringKind:
		p.text(field, v.String())
	case protoreflect.BytesKind:
		p.text(field, string(v.Bytes()))
	}
}

// pairs: labels and annotations are stored as they are; the values of other maps are
// written to files of the kernel.
func (p *problems) pairs(field string, f protoreflect.FieldDescriptor, pairs protoreflect.Map) {
	size := 0
	pairs.Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
		size += len(key.String()) + len(value.String())
		if f.Name() != "labels" && f.Name() != "annotations" {
			p.text(fmt.Sprintf("%s[%s]", field, key), value.String())
		} else if !utf8.ValidString(key.String()) || !utf8.ValidString(value.String()) {
			p.bad(field, "%q is not UTF-8", key)
		}
		return true
	})
	if size > mostText {
		p.bad(field, "keys and values have %d bytes together, more than %d", size, mostText)
	}
}

func (p *problems) text(field, text string) {
	if strings.ContainsRune(text, 0) {
		p.bad(field, "has a NUL character")
	}
}

// absolute: a place that does not lead back up.
func (p *problems) absolute(field, name string) {
	p.place(field, name)
	if leadsUp(name) {
		p.bad(field, "%q has an element '..'", name)
	}
}

func leadsUp(name string) bool { return slices.Contains(strings.Split(name, "/"), "..") }

// place: one in a container may lead back up. It is cleaned, and nothing is above /.
func (p *problems) place(field, name string) {
	if !path.IsAbs(name) {
		p.bad(field, "%q is not an absolute path", name)
	}
}

func (p *problems) mode(field string, mode runtimeapi.NamespaceMode, allowed ...runtimeapi.NamespaceMode) {
	if !slices.Contains(allowed, mode) {
		p.bad(field, "%v is not one of %v", mode, allowed)
	}
}

func (p *problems) id(field string, id, last int64) {
	if id < 0 || id > last {
		p.bad(field, "%d is not a user or group id", id)
	}
}

func (p *problems) ids(field string, ids []int64, last int64) {
	for i, id := range ids {
		p.id(fmt.Sprintf("%s[%d]", field, i), id, last)
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

// profiles are those of a pod or a container.
func (p *problems) profiles(seccomp, apparmor *runtimeapi.SecurityProfile, m machine.Machine) {
	if err := checkSeccomp(seccomp); err != nil {
		p.bad(securityContext+"seccomp", "%w", err)
	}
	if err := checkAppArmor(apparmor, m); err != nil {
		p.bad(securityContext+"apparmor", "%w", err)
	}
}

// errNoAppArmor: a profile was asked for by name on a machine without AppArmor.
var errNoAppArmor = errors.New("this machine has no AppArmor")

// checkAppArmor reports why an AppArmor profile cannot be used.
func checkAppArmor(profile *runtimeapi.SecurityProfile, m machine.Machine) error {
	name := strings.TrimPrefix(profile.GetLocalhostRef(), "localhost/")
	switch {
	case profile.GetProfileType() != runtimeapi.SecurityProfile_Localhost:
		return nil
	case !m.AppArmor:
		return fmt.Errorf("profile %q: %w", name, errNoAppArmor)
	}
	loaded, err := os.ReadFile("/sys/kernel/security/apparmor/profiles")
	if err != nil {
		return fmt.Errorf("list the loaded AppArmor profiles: %w", err)
	}
	if !strings.Contains("\n"+string(loaded), "\n"+name+" (") {
		return fmt.Errorf("AppArmor profile %q is not loaded: load it with apparmor_parser", name)
	}
	return nil
}

// checkSeccomp reports why a seccomp profile cannot be used.
func checkSeccomp(profile *runtimeapi.SecurityProfile) error {
	ref := profile.GetLocalhostRef()
	switch {
	case profile.GetProfileType() != runtimeapi.SecurityProfile_Localhost:
		return nil
	case !filepath.IsAbs(ref):
		return fmt.Errorf("localhost_ref %q is not an absolute path", ref)
	}
	if info, err := os.Stat(ref); err != nil {
		return err
	} else if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a file", ref)
	}
	return nil
}
