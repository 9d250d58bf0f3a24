// Package validate checks what the CRI asks for before anything is done. Pod, Container and Resources report
// all problems of a request in one error of the kind errdefs.ErrInvalidArgument, each with its field in the
// API. They have no side effects, and read nothing else but profiles that a request names by file. There is
// no state, and no lock.
package validate

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/state"
)

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
	longestName = 253 // the limit of Kubernetes for any name
	// maxText bounds all labels, and all annotations, of a pod or container, since every list holds them.
	// It is twice the API server's limit (TotalAnnotationSizeLimitB): the kubelet adds its own.
	maxText = 512 << 10

	// The highest id means "no change" (setresuid(2)); readers of /etc/passwd take half of the ids.
	lastID, lastPosixID = math.MaxUint32 - 1, math.MaxInt32

	securityContext = "config.linux.security_context."
	namespaceField  = securityContext + "namespace_options."
)

// form checks all fields: no NUL, UTF-8 in labels and annotations, known enumerations, nothing for Windows.
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

// pairs: labels and annotations are stored as they are; other values are written to files of the kernel.
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
	if size > maxText {
		p.bad(field, "keys and values have %d bytes together, more than %d", size, maxText)
	}
}

func (p *problems) text(field, text string) {
	if strings.ContainsRune(text, 0) {
		p.bad(field, "has a NUL character")
	}
}

func (p *problems) absolute(field, name string) {
	p.place(field, name)
	if leadsUp(name) {
		p.bad(field, "%q has an element '..'", name)
	}
}

func leadsUp(name string) bool { return slices.Contains(strings.Split(name, "/"), "..") }

// place may lead back up in a container: it is cleaned, and nothing is above /.
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

func (p *problems) profiles(seccomp, apparmor *runtimeapi.SecurityProfile, m machine.Machine) {
	if err := Seccomp(seccomp); err != nil {
		p.bad(securityContext+"seccomp", "%w", err)
	}
	if err := AppArmor(apparmor, m); err != nil {
		p.bad(securityContext+"apparmor", "%w", err)
	}
}

// AppArmor refuses a profile that is not there: with it no container can be made.
func AppArmor(profile *runtimeapi.SecurityProfile, m machine.Machine) error {
	name := strings.TrimPrefix(profile.GetLocalhostRef(), "localhost/")
	switch {
	case profile.GetProfileType() != runtimeapi.SecurityProfile_Localhost:
		return nil
	case !m.AppArmor:
		return fmt.Errorf("profile %q: this machine has no AppArmor", name)
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

// Seccomp refuses a profile that is no file.
func Seccomp(profile *runtimeapi.SecurityProfile) error {
	ref := profile.GetLocalhostRef()
	switch {
	case profile.GetProfileType() != runtimeapi.SecurityProfile_Localhost:
		return nil
	case !filepath.IsAbs(ref):
		return fmt.Errorf("localhost_ref %q is not an absolute path", ref)
	}
	body, err := state.ReadFile(ref)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, &specs.LinuxSeccomp{}); err != nil {
		return fmt.Errorf("%s is no seccomp profile: %w", ref, err)
	}
	return nil
}

// Resources checks an update of resources; field is their place in the request, with a dot at its end.
func Resources(field string, r *runtimeapi.LinuxContainerResources, m machine.Machine) error {
	p := &problems{}
	p.resources(field, r, m)
	return p.err()
}

// InForce checks all resources in force together, where one may need another.
func InForce(field string, r *runtimeapi.LinuxContainerResources, m machine.Machine) error {
	p := &problems{}
	p.inForce(field, r, m)
	return p.err()
}

// inForce: a limit of memory and swap together needs one of memory.
func (p *problems) inForce(field string, r *runtimeapi.LinuxContainerResources, m machine.Machine) {
	p.resources(field, r, m)
	if swap, memory := r.GetMemorySwapLimitInBytes(), r.GetMemoryLimitInBytes(); swap > 0 && (memory == 0 || memory == -1) {
		p.bad(field+"memory_swap_limit_in_bytes", "%d includes a memory limit, but there is none: set memory_limit_in_bytes, or -1 here", swap)
	}
}

// resources: zero asks for nothing, -1 is no limit. The CPU's bounds are the kernel's, in microseconds
// (kernel/sched/core.c: MIN_SHARES, MAX_SHARES, min_cfs_quota_period, max_cfs_quota_period, max_cfs_runtime).
func (p *problems) resources(field string, r *runtimeapi.LinuxContainerResources, m machine.Machine) {
	swap, memory := r.GetMemorySwapLimitInBytes(), r.GetMemoryLimitInBytes()
	for _, number := range []struct {
		name               string
		value, least, most int64
		hasNone            bool
	}{
		{"cpu_period", r.GetCpuPeriod(), 1_000, 1_000_000, false},
		{"cpu_quota", r.GetCpuQuota(), 1_000, 1<<44 - 1, true},
		{"cpu_shares", r.GetCpuShares(), 2, 1 << 18, false},
		{"memory_limit_in_bytes", memory, 1, math.MaxInt64, true},
		{"memory_swap_limit_in_bytes", swap, 1, math.MaxInt64, true},
		{"oom_score_adj", r.GetOomScoreAdj(), -1000, 1000, false}, // proc_pid_oom_score_adj(5)
	} {
		if number.value == 0 || number.value == -1 && number.hasNone {
			continue
		}
		if number.value < number.least || number.value > number.most {
			p.bad(field+number.name, "%d is not between %d and %d", number.value, number.least, number.most)
		}
	}
	if swap > 0 && swap < memory {
		p.bad(field+"memory_swap_limit_in_bytes", "%d is less than the memory limit %d, which it includes", swap, memory)
	}
	p.cpuset(field+"cpuset_cpus", r.GetCpusetCpus(), m.CPUs)
	p.cpuset(field+"cpuset_mems", r.GetCpusetMems(), m.MemoryNodes)
	for i, limit := range r.GetHugepageLimits() {
		switch at, size := fmt.Sprintf("%shugepage_limits[%d].page_size", field, i), limit.GetPageSize(); {
		case !hugepageSize.MatchString(size):
			p.bad(at, "%q is not a size like 2MB or 1GB", size)
		case len(m.HugepageSizes) > 0 && !slices.Contains(m.HugepageSizes, size):
			p.bad(at, "this machine has no huge pages of %s, it has %q", size, m.HugepageSizes)
		}
	}
	p.unified(field+"unified", r.GetUnified(), m)
}

var hugepageSize = regexp.MustCompile(`^[1-9][0-9]*[KMGT]B$`)

// cpuset: numbers and ranges with commas (cpuset(7), list format), below count if it is known.
func (p *problems) cpuset(field, set string, count uint64) {
	if set == "" {
		return
	}
	for part := range strings.SplitSeq(set, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, err := strconv.ParseUint(first, 10, 31)
		to, errLast := strconv.ParseUint(last, 10, 31)
		if errors.Join(err, errLast) != nil || to < from {
			p.bad(field, "%q is not a list of numbers and ranges", set)
			return
		}
		if count > 0 && to >= count {
			p.bad(field, "%d is not on this machine, whose last one is %d", to, count-1)
			return
		}
	}
}

// unified: each key is a file of the cgroup, CONTROLLER.FILE, or cgroup.FILE.
func (p *problems) unified(field string, keys map[string]string, m machine.Machine) {
	if len(keys) > 0 && !m.CgroupV2 {
		p.bad(field, "needs cgroup v2, this machine has v1")
		return
	}
	for key, value := range keys {
		controller, what, _ := strings.Cut(key, ".")
		switch {
		case controller == "" || what == "" || strings.ContainsAny(key, "/\x00") || strings.ContainsRune(value, 0):
			p.bad(fmt.Sprintf("%s[%s]", field, key), "is not a file of a cgroup")
		case controller != "cgroup" && len(m.Controllers) > 0 && !slices.Contains(m.Controllers, controller):
			p.bad(fmt.Sprintf("%s[%s]", field, key), "there is no controller %q, this machine has %q", controller, m.Controllers)
		}
	}
}
