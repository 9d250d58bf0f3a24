package validate

import (
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestCheckSysctl(t *testing.T) {
	const pod, node = runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_NODE
	for _, test := range []struct {
		name         string
		network, ipc runtimeapi.NamespaceMode
		// says is in the error, "" for none.
		says string
	}{
		{"net.ipv4.tcp_syncookies", pod, pod, ""},
		{"net/ipv4/conf/eth0.1/arp_filter", pod, node, ""},
		{"kernel.shm_rmid_forced", node, pod, ""},
		{"kernel/msgmax", pod, pod, ""},
		{"kernel.sem", pod, pod, ""},
		{"fs.mqueue.msg_max", pod, pod, ""},
		{"net.ipv4.tcp_syncookies", node, pod, "network namespace"},
		{"net/ipv4/tcp_syncookies", node, pod, "network namespace"},
		{"kernel.shmmax", pod, node, "IPC namespace"},
		{"fs.mqueue.msg_max", pod, node, "IPC namespace"},
		{"kernel.panic", pod, pod, "change the node"},
		{"vm.overcommit_memory", pod, pod, "change the node"},
		{"fs.file-max", pod, pod, "change the node"},
		{"kernel.shmmax.more", pod, pod, "change the node"},
		{"netx.a", pod, pod, "change the node"},
		{"net", pod, pod, "change the node"},
		{"", pod, pod, "not a name"},
		{"net.ipv4..tcp_syncookies", pod, pod, "not a name"},
		{"net/../kernel/panic", pod, pod, "not a name"},
		{"net.ipv4.conf/../../../kernel/panic", pod, pod, "not a name"},
		{"net.ipv4.a b", pod, pod, "not a name"},
		{"net.ipv4.a\x00b", pod, pod, "not a name"},
	} {
		config := &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
			NamespaceOptions: &runtimeapi.NamespaceOption{Network: test.network, Ipc: test.ipc},
		}}}
		err := checkSysctl(config, test.name)
		switch {
		case test.says == "" && err != nil:
			t.Errorf("checkSysctl(network %v, ipc %v, %q): %v", test.network, test.ipc, test.name, err)
		case test.says != "" && (err == nil || !strings.Contains(err.Error(), test.says)):
			t.Errorf("checkSysctl(network %v, ipc %v, %q) = %v, want an error that says %q", test.network, test.ipc, test.name, err, test.says)
		}
	}
}

func TestCheckCgroupParent(t *testing.T) {
	for _, test := range []struct {
		parent  string
		systemd bool
		// says is in the error, "" for none.
		says string
	}{
		{"", false, ""},
		{"", true, ""},
		{"/kubepods/besteffort", false, ""},
		{"/a..b", false, ""},
		{"/kubepods.slice/kubepods-pod1.slice", true, ""},
		{"kubepods.slice", false, ""},
		{"/kubepods/..", false, "'..'"},
		{"../up", false, "'..'"},
		{"/kubepods/../../up.slice", true, "'..'"},
		{"/a\x00b", false, "NUL"},
		{"/a:b", false, "a character"},
		{"/kubepods/pod1", true, "not a slice"},
		{"/kubepods.slice/pod1", true, "not a slice"},
	} {
		err := checkCgroupParent(test.parent, test.systemd)
		switch {
		case test.says == "" && err != nil:
			t.Errorf("checkCgroupParent(%q, systemd %v): %v", test.parent, test.systemd, err)
		case test.says != "" && (err == nil || !strings.Contains(err.Error(), test.says)):
			t.Errorf("checkCgroupParent(%q, systemd %v) = %v, want an error that says %q", test.parent, test.systemd, err, test.says)
		}
	}
}
