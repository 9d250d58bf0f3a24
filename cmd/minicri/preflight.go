package main

import (
	"fmt"
	"os"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/stream"
)

// preflight returns everything for which a daemon with this configuration refuses to
// start on this machine, apart from what Config.Check finds. Each error begins with its
// key.
func preflight(c *config.Config, m machine.Machine) (problems []error) {
	defaults, err := readDefaults(c, m)
	_, handlersErr := handlerDefaults(c, defaults)
	s := c.Streaming
	certErr := stream.TLS{Cert: s.TLSCert, Key: s.TLSKey}.Check()
	if certErr != nil {
		certErr = fmt.Errorf("streaming.tls_cert, streaming.tls_key: %w", certErr)
	}
	metricsErr := stream.TLS{Cert: c.MetricsCert, Key: c.MetricsKey}.Check()
	if metricsErr != nil {
		metricsErr = fmt.Errorf("metrics_tls_cert, metrics_tls_key: %w", metricsErr)
	}
	for _, err := range []error{checkCgroupDriver(c), err, handlersErr, certErr, metricsErr} {
		if err != nil {
			problems = append(problems, err)
		}
	}
	return problems
}

// located adds file and line to each.
func located(l *config.Loaded, problems []error) []error {
	for i, problem := range problems {
		problems[i] = l.Locate(problem)
	}
	return problems
}

// systemdRuns reports whether systemd manages this machine (sd_booted(3)).
func systemdRuns() bool {
	_, err := os.Stat("/run/systemd/system")
	return err == nil
}

func checkCgroupDriver(c *config.Config) error {
	if c.CgroupDriver == "systemd" && !systemdRuns() {
		return fmt.Errorf("cgroup_driver: systemd does not run here (there is no /run/systemd/system), so no pod could be started: write 'cgroupfs', for the kubelet too")
	}
	return nil
}
