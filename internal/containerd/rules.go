// Package containerd converts containerd's configuration, of version 2 or 3, into minicri's, by a table of keys
// (rules.go). Comments of the new file name what has no counterpart. The package owns nothing and keeps no state.
package containerd

import "maps"

// rule says what becomes of a key of containerd.
type rule struct {
	usual   any    // containerd's default, which needs no key; nil is no default
	to, why string // minicri's key, or why there is none; neither for a key of no use
	as      func(any) any
}

const (
	always  = "minicri always does"
	never   = "there is no such thing in minicri"
	kubelet = "the kubelet decides"
)

// rules are by key; CRI's plugins have the prefix cri in both versions.
func rules() map[string]rule {
	all := map[string]rule{
		"version": {}, "root": {}, "state": {}, "temp": {}, "imports": {},
		"plugin_dir": {}, "oom_score": {}, "disabled_plugins": {}, "required_plugins": {},
		"grpc.address":    {usual: "/run/containerd/containerd.sock", why: "minicri's socket is /run/minicri/minicri.sock; the key 'socket' moves it"},
		"debug.level":     {to: "log_level", usual: "", as: logLevel},
		"debug.format":    {usual: "", why: never},
		"metrics.address": {usual: "", to: "metrics_address"},
		"plugins.io.containerd.nri.v1.nri.disable":                     {usual: true, to: "nri.enabled", as: not},
		"plugins.io.containerd.nri.v1.nri.socket_path":                 {usual: "/var/run/nri/nri.sock", to: "nri.socket"},
		"plugins.io.containerd.nri.v1.nri.plugin_path":                 {usual: "/opt/nri/plugins", to: "nri.plugin_dir"},
		"plugins.io.containerd.nri.v1.nri.plugin_config_path":          {usual: "/etc/nri/conf.d", to: "nri.config_dir"},
		"plugins.io.containerd.nri.v1.nri.disable_connections":         {usual: false},
		"plugins.io.containerd.nri.v1.nri.plugin_registration_timeout": {usual: "5s", to: "nri.registration_timeout"},
		"plugins.io.containerd.nri.v1.nri.plugin_request_timeout":      {usual: "2s", to: "nri.request_timeout"},
		"plugins.io.containerd.tracing.processor.v1.otlp.endpoint":     {usual: "", to: "tracing.endpoint"},
		"plugins.io.containerd.tracing.processor.v1.otlp.insecure":     {usual: false, to: "tracing.insecure"},
		"plugins.io.containerd.tracing.processor.v1.otlp.protocol":     {usual: "", to: "tracing.protocol"},
		"plugins.io.containerd.internal.v1.tracing.service_name":       {},
	}
	maps.Copy(all, rulesOfCRI())
	return all
}

func rulesOfCRI() map[string]rule {
	return map[string]rule{
		"cri.sandbox_image": {}, "cri.pinned_images.sandbox": {}, // pause is embedded
		"cri.max_concurrent_downloads":     {usual: int64(3), to: "images.max_downloads"},
		"cri.image_pull_progress_timeout":  {usual: "5m0s", to: "images.progress_timeout"},
		"cri.image_pull_with_sync_fs":      {usual: false},
		"cri.snapshotter":                  {usual: "overlayfs", why: "minicri has overlay alone"},
		"cri.containerd.snapshotter":       {usual: "overlayfs", why: "minicri has overlay alone"},
		"cri.discard_unpacked_layers":      {to: "images.keep_layers", as: not},
		"cri.registry.config_path":         {usual: "", to: "images.certs_dirs", as: directories},
		"cri.disable_snapshot_annotations": {}, "cri.stats_collect_period": {}, "cri.use_local_image_pull": {},
		"cri.max_concurrent_unpacks": {usual: int64(1), why: "minicri unpacks the layers of an image one after the other"},
		"cri.enable_selinux":         {usual: false, why: "minicri labels containers where SELinux is on"}, "cri.selinux_category_range": {usual: int64(1024), why: never},
		"cri.max_container_log_line_size": {usual: int64(16384), why: never}, "cri.max_container_log_size": {usual: int64(16384), why: never},
		"cri.disable_apparmor": {usual: false, why: kubelet}, "cri.restrict_oom_score_adj": {usual: false, why: never},
		"cri.unset_seccomp_profile": {usual: "", to: "default_seccomp"}, "cri.disable_cgroup": {usual: false, why: never},
		"cri.disable_proc_mount": {usual: false, why: never}, "cri.disable_hugetlb_controller": {usual: true},
		"cri.tolerate_missing_hugetlb_controller":    {usual: true},
		"cri.device_ownership_from_security_context": {usual: false, to: "device_ownership_from_security_context"},
		"cri.ignore_image_defined_volumes":           {usual: false, why: never},
		"cri.netns_mounts_under_state_dir":           {usual: false, why: "the key 'netns_dir' says where they are pinned"},
		"cri.enable_unprivileged_ports":              {usual: true, why: always},
		"cri.enable_unprivileged_icmp":               {usual: true, why: always},
		"cri.enable_cdi":                             {usual: true, why: always},
		"cri.cdi_spec_dirs":                          {usual: []any{"/etc/cdi", "/var/run/cdi"}, to: "cdi_spec_dirs"},
		"cri.drain_exec_sync_io_timeout":             {}, "cri.ignore_deprecation_warnings": {}, "cri.stats_retention_period": {},
		"cri.systemd_cgroup": {usual: false, to: "cgroup_driver", as: driver}, "cri.image_decryption.key_model": {usual: "node", why: never},
		"cri.containerd.default_runtime_name":              {usual: "runc", to: "default_runtime"},
		"cri.containerd.ignore_blockio_not_enabled_errors": {}, "cri.containerd.ignore_rdt_not_enabled_errors": {},
		"cri.containerd.disable_snapshot_annotations": {},
		"cri.containerd.discard_unpacked_layers":      {to: "images.keep_layers", as: not},
		"cri.containerd.no_pivot":                     {usual: false, why: never},
		"cri.cni.bin_dir":                             {usual: "/opt/cni/bin", to: "cni_bin_dir"},
		"cri.cni.bin_dirs":                            {usual: []any{"/opt/cni/bin"}, to: "cni_bin_dir", as: joined},
		"cri.cni.conf_dir":                            {usual: "/etc/cni/net.d", to: "cni_conf_dir"},
		"cri.cni.max_conf_num":                        {usual: int64(1), why: "minicri uses the first network alone"},
		"cri.cni.conf_template":                       {usual: "", why: "the table default_network makes a network of the node's pod CIDR"},
		"cri.cni.ip_pref":                             {usual: "", why: never},
		"cri.cni.setup_serially":                      {}, "cri.cni.use_internal_loopback": {}, "cri.disable_tcp_service": {},
		"cri.stream_server_address":                 {usual: "127.0.0.1"},
		"cri.stream_server_port":                    {usual: "0"},
		"cri.stream_idle_timeout":                   {usual: "4h0m0s", to: "streaming.idle_timeout"},
		"cri.enable_tls_streaming":                  {usual: false},
		"cri.x509_key_pair_streaming.tls_cert_file": {usual: "", to: "streaming.tls_cert"},
		"cri.x509_key_pair_streaming.tls_key_file":  {usual: "", to: "streaming.tls_key"},
	}
}
