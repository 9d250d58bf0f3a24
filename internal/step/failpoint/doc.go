// Package failpoint lets tests make a named point of the program fail, hang or
// die. The names are those of the steps of pods and containers, so one call in the
// step runner covers them all. In a normal build the package is an empty
// function that the compiler removes; with the build tag "failpoints" the file
// named by the environment variable MINICRI_FAILPOINTS is read at each point.
// The package keeps no state.
//
// The points are "STEP before" and "STEP after" for each step (see packages sandbox
// and container), and "rename DIRECTORY" between the writing of a record
// and its renaming, where DIRECTORY is sandboxes, attachments or facts; "lock
// pods", while the lock of all pods is held; and, of a starter (package supervisor/starter),
// "starter/asked", "starter/made" before it answers, and "starter/answered".
package failpoint
