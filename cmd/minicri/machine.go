package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/oci"
)

// pluginCgroup is where the cgroups of plugin runs are made: next to those of
// pods or, under systemd, which owns the cgroups of pods, in the daemon's own.
func pluginCgroup(c *config.Config) string {
	if systemdCgroup(c) {
		return ""
	}
	return cgroupParent(c, false)
}

// readMachine reads what the machine offers, and logs what it lacks.
func readMachine(ctx context.Context, root string, logger *slog.Logger) (machine.Machine, error) {
	m, err := machine.Read(root)
	if err != nil {
		return m, err
	}
	if !m.CanLowerOOMAdj {
		logger.Warn("no CAP_SYS_RESOURCE: processes get no lower oom_score_adj than the daemon has", "oom_score_adj", m.OOMScoreAdj)
	}
	if !m.AppArmor {
		logger.Info("no AppArmor, or no apparmor_parser: profiles of the kind RuntimeDefault confine nothing here")
		return m, nil
	}
	if err := machine.LoadDefaultProfile(ctx); err != nil {
		// As in a container that is a node: pods run, and are confined by less.
		logger.Warn("AppArmor confines nothing here", "err", err)
		m.AppArmor = false
	}
	return m, nil
}

// openNode finds out which node this is, and notes the cgroup below which pods are
// made that name none.
func openNode(c *config.Config, systemd bool) (*node.Node, error) {
	n, err := node.Open(c.Root, c.State, c.NetnsDir)
	if err != nil {
		return nil, err
	}
	return n, n.Know(cgroup.Path(oci.CgroupsPath(cgroupParent(c, systemd), n.Mark(), "id", systemd)))
}

func findShim(path string) (string, error) {
	if path == "" {
		self, err := os.Executable()
		if err != nil {
			return "", err
		}
		path = filepath.Join(filepath.Dir(self), "minicri-shim")
	}
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("minicri-shim: %w: install it in the directory of minicri, or give --shim", err)
	}
	return path, nil
}

// systemdCgroup reports whether the cgroup driver is systemd: by the configuration,
// or if it has none because the machine runs systemd with cgroup v2.
func systemdCgroup(c *config.Config) bool {
	if c.CgroupDriver != "" {
		return c.CgroupDriver == "systemd"
	}
	return systemdRuns() && cgroup.Unified()
}

func cgroupParent(c *config.Config, systemd bool) string {
	switch {
	case c.CgroupParent != "":
		return c.CgroupParent
	case systemd:
		return "system.slice"
	default:
		return "/minicri"
	}
}
