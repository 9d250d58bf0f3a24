// Package container tests containers end to end: the real daemon, shim, CNI plugins and kernel, on nodes of package
// nodetest, with an image of busybox. The numbers in the names of tests, as P34, are those of
// docs/contributors/properties.md.
package container
