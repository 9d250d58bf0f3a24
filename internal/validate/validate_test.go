package validate

import (
	"strconv"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// set gives a field a value, by the path that a refusal names it by: "mounts[0].host_path".
func set(m protoreflect.Message, path string, value any) {
	name, rest, deeper := strings.Cut(path, ".")
	name, index, element := strings.Cut(strings.TrimSuffix(name, "]"), "[")
	field := m.Descriptor().Fields().ByName(protoreflect.Name(name))
	i, _ := strconv.Atoi(index)
	switch {
	case deeper && element:
		set(m.Mutable(field).List().Get(i).Message(), rest, value)
	case deeper:
		set(m.Mutable(field).Message(), rest, value)
	case value == nil:
		m.Clear(field)
	case element:
		m.Mutable(field).List().Set(i, valueOf(field, value))
	case field.IsList():
		m.Clear(field)
		for _, mapping := range value.([]*runtimeapi.IDMapping) {
			m.Mutable(field).List().Append(protoreflect.ValueOf(mapping.ProtoReflect()))
		}
	default:
		m.Set(field, valueOf(field, value))
	}
}

func valueOf(field protoreflect.FieldDescriptor, value any) protoreflect.Value {
	if message, is := value.(proto.Message); is {
		return protoreflect.ValueOf(message.ProtoReflect())
	}
	n, is := value.(int)
	switch {
	case !is:
		return protoreflect.ValueOf(value)
	case field.Kind() == protoreflect.EnumKind:
		return protoreflect.ValueOf(protoreflect.EnumNumber(n))
	case field.Kind() == protoreflect.Int32Kind:
		return protoreflect.ValueOf(int32(n))
	case field.Kind() == protoreflect.MessageKind:
		return protoreflect.ValueOf((&runtimeapi.Int64Value{Value: int64(n)}).ProtoReflect())
	}
	return protoreflect.ValueOf(int64(n))
}

func TestCheckSysctl(t *testing.T) {
	const pod, node = runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_NODE
	type modes struct{ network, ipc runtimeapi.NamespaceMode }
	for says, names := range map[string]map[string]modes{
		"": {
			"net.ipv4.tcp_syncookies": {pod, pod}, "net/ipv4/conf/eth0.1/arp_filter": {pod, node}, "kernel.shm_rmid_forced": {node, pod},
			"kernel/msgmax": {pod, pod}, "kernel.sem": {pod, pod}, "fs.mqueue.msg_max": {pod, pod},
		},
		"network namespace": {"net.ipv4.tcp_syncookies": {node, pod}, "net/ipv4/tcp_syncookies": {node, pod}},
		"IPC namespace":     {"kernel.shmmax": {pod, node}, "fs.mqueue.msg_max": {pod, node}},
		"change the node":   {"kernel.panic": {}, "vm.overcommit_memory": {}, "fs.file-max": {}, "kernel.shmmax.more": {}, "netx.a": {}, "net": {}},
		"not a name": {
			"": {}, "net.ipv4..tcp_syncookies": {}, "net/../kernel/panic": {}, "net.ipv4.conf/../../../kernel/panic": {}, "net.ipv4.a b": {}, "net.ipv4.a\x00b": {},
		},
	} {
		for name, m := range names {
			config := &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Network: m.network, Ipc: m.ipc},
			}}}
			wantText(t, name, checkSysctl(config, name), says)
		}
	}
}

// wantText: an error that says this, none for "".
func wantText(t *testing.T, of string, err error, says string) {
	harness.Want(t, (err == nil) == (says == "") && (err == nil || strings.Contains(err.Error(), says)),
		"%q: %v, want an error that says %q", of, err, says)
}

func TestBitsPerSecond(t *testing.T) {
	for text, want := range map[string]uint64{
		"0": 0, "1000": 1000, "1k": 1000, "1.5M": 1_500_000, "2G": 2_000_000_000, "1T": 1_000_000_000_000, "1P": 1_000_000_000_000_000,
		"1Ki": 1024, "10Mi": 10 << 20, "0.5Gi": 512 << 20, "1e3": 1000,
	} {
		got, err := BitsPerSecond(text)
		harness.Want(t, err == nil && got == want, "BitsPerSecond(%q) = %d, %v, want %d", text, got, err, want)
	}
	for _, text := range []string{"", "k", "1K", "1m", "1ki", "1kk", "1i", "1 k", "-1k", "ten", "NaN", "NaNk", "Inf", "1e400", "9999999999P"} {
		got, err := BitsPerSecond(text)
		harness.Want(t, err != nil, "BitsPerSecond(%q) = %d", text, got)
	}
}

func TestCheckCgroupParent(t *testing.T) {
	for says, parents := range map[string]map[string]bool{ // by the driver, true for systemd
		"":            {"": true, "/kubepods/besteffort": false, "/a..b": false, "/kubepods.slice/kubepods-pod1.slice": true, "kubepods.slice": false},
		"'..'":        {"/kubepods/..": false, "../up": false, "/kubepods/../../up.slice": true},
		"NUL":         {"/a\x00b": false},
		"a character": {"/a:b": false},
		"not a slice": {"/kubepods/pod1": true, "/kubepods.slice/pod1": true},
		"bytes":       {"/" + strings.Repeat("a", longestElement+1): false},
	} {
		for parent, systemd := range parents {
			wantText(t, parent, CgroupParent(parent, systemd), says)
		}
	}
}
