// Package oci turns what the CRI asks for into what an OCI runtime reads
// (runtime-spec, config.json).
//
// A spec is made by an ordered list of small rules, one list for a pod's pause
// process (ForSandbox) and one for its containers (ForContainer). Each rule
// reads the CRI config and the paths that were made for the pod, and sets one
// part of the spec; there is a file for each part, and golden tests hold what it
// makes of a config. The package owns nothing, keeps no state and has no side
// effects. What is read of the node are devices, profiles, the mount table and
// links in the sources of mounts; what is read of the image comes with the
// Container.
package oci
