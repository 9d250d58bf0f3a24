// Package oci turns what the CRI asks for into what an OCI runtime reads
// (runtime-spec, config.json).
//
// A spec is made by an ordered list of small rules. Each rule reads the CRI
// config and the paths that were made for the pod, and sets one part of the
// spec; each stands in a file of its own with a golden test. The package owns
// nothing, keeps no state and has no side effects: the same input gives the
// same spec.
package oci
