package config

import "time"

// Default is the configuration of a machine where nothing is configured.
func Default() *Config {
	second := func(n int) Duration { return Duration(time.Duration(n) * time.Second) }
	return &Config{
		Socket:         "/run/minicri/minicri.sock",
		Root:           "/var/lib/minicri",
		State:          "/run/minicri",
		NetnsDir:       "/run/netns",
		CNIConf:        "/etc/cni/net.d",
		CNIBin:         "/opt/cni/bin:/usr/lib/cni:/usr/local/lib/minicri/cni:/usr/lib/minicri/cni",
		LogLevel:       "info",
		LogFormat:      "text",
		DefaultUlimits: []string{}, DefaultEnv: []string{}, DefaultSysctls: []string{}, PodAnnotations: []string{}, ContainerAnnotations: []string{},
		ShmSize:  64 << 20,
		Runtimes: map[string]Runtime{"runc": {Type: Builtin, Args: []string{}, PodAnnotations: []string{}, ContainerAnnotations: []string{}}},
		DefaultNetwork: DefaultNetwork{
			Name:       "minicri",
			Bridge:     "minicri0",
			Masquerade: true,
		},
		Images: Images{
			CertsDirs: []string{"/etc/minicri/certs.d", "/etc/containerd/certs.d"},
			Pinned:    []string{}, Sync: true, VerifierTimeout: second(10), ProgressTimeout: second(60), MinRate: 1024, MaxDownloads: 3, MaxUnpacks: 2,
		},
		Streaming: Streaming{Address: "127.0.0.1:0", Idle: second(4 * 3600), Creation: second(30), MaxOpen: 1000},
		NRI: NRI{
			Socket: "/var/run/nri/nri.sock", PluginDir: "/opt/nri/plugins", ConfigDir: "/etc/nri/conf.d",
			Registration: second(5), Request: second(2), Required: []string{}, Reject: []string{},
		},
		Tracing: Tracing{Protocol: "grpc", Insecure: true},
		Limits: Limits{
			Run: second(230), Destroy: second(100), Create: second(100), Kill: second(10),
			CNIAdd: second(180), CNIDel: second(60), CNICheck: second(20), CNIStatus: second(5), CNIGC: second(60),
			DetachTries: 5, DetachTime: second(300), GiveUpTries: 10, GiveUpTime: second(600),
			RetryFirst: second(1), RetryMost: second(300),
			Reload: second(1), Status: second(5), GC: second(600), Shutdown: second(10),
		},
	}
}
