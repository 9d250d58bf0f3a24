// Package timeline tests that what goes wrong with a pod can be explained from `minicri timeline` alone: on the real
// daemon, with real plugins, registries, disks and kernels. docs/troubleshooting.md is made of what these tests see
// (go test -update).
package timeline
