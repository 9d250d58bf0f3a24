//go:build race

package client_test

// The shim is built with the race detector when the tests are.
var raceFlags = []string{"-race"}
