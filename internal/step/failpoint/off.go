//go:build !failpoints

// Package failpoint lets tests make a named point of the program fail, hang or die. In a normal build it is
// an empty function that the compiler removes. With the build tag "failpoints" it reads the file that
// MINICRI_FAILPOINTS names at each point. It keeps no state.
//
// The points are "STEP before" and "STEP after" for each step (see packages sandbox and container); "rename
// DIRECTORY" between the writing and the renaming of a record there (package state); "lock pod sandbox" and
// "lock container" while the lock of all of a kind is held; and of a starter (package supervisor/starter) "starter/asked",
// "starter/made" before it answers, and "starter/answered".
package failpoint

// Hit does nothing in a build without the tag "failpoints".
func Hit(string) error { return nil }

// Environ is empty in a build without the tag "failpoints".
func Environ() []string { return nil }
