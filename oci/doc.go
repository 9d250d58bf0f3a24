// Package oci turns what the CRI asks for into what an OCI runtime reads
// (runtime-spec, config.json).
//
// A spec is made by an ordered list of small rules, one list for a pod's pause
// process (ForSandbox) and one for its containers (ForContainer). Each rule
// reads the CRI config and the paths that were made for the pod, and sets one
// part of the spec; each stands in a file of its own with a golden test. The
// package owns nothing, keeps no state and has no side effects: the same input
// gives the same spec. Part of the input of a container's rules are files of
// the node: the rootfs with its /etc/passwd, devices, mounts, profiles.
//
// What a container needs done on the node is apart from the rules, in steps
// that can be repeated and that its caller takes in this order:
//
//	CheckContainer   refuse a malformed request
//	MakeSources      make directories that mounts come from
//	ForContainer     the rules
//	Relabel          label the sources of mounts
package oci
