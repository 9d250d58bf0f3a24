//go:build !failpoints

package failpoint

// Hit does nothing in a build without the tag "failpoints".
func Hit(string) error { return nil }

// Environ is empty in a build without the tag "failpoints".
func Environ() []string { return nil }
