// Package critest runs critest, the validation suite of the CRI
// (sigs.k8s.io/cri-tools), against a daemon: make critest. The images that its
// specs pull are built here and served by a registry in this process, which
// stands in for registry.k8s.io, k8s.gcr.io and gcr.io by hosts.toml files; no
// other host is asked.
//
// All specs run. None may fail, and those that skip themselves have to be
// listed with their reason in skipped.txt. One constant of the suite is replaced
// when it is built (hack/critest/build): the digest of an image that only its
// owner can push.
package critest
