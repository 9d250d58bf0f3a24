//go:build !race

package client_test

var raceFlags []string
