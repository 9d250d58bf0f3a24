// Package e2e holds the end-to-end tests of minicri, one file for each
// feature: the real daemon over its socket, real CNI plugins, the real kernel.
//
// A test makes a node of the package harness, which looks for leaks when the
// test ends. TestPropertyN_ tests the property of that number in
// docs/properties.md. The package has no other code
// than its tests; they need root and run under hack/in-netns.
package e2e
