// Package container tests containers end to end: the real daemon, shim, CNI
// plugins and kernel, on nodes of package harness, with an image of busybox.
// Each file is about one feature. The numbers in the names of tests, as P34, are
// those of docs/properties.md.
//
//	P32      events, and who does not read them (event_test.go)
//	P34      exit code, times and reason over a restart (daemon_test.go)
//	P35      whose namespaces an exec joins (namespace_test.go)
//	P36, P58 what a command may leave behind (exec_test.go)
//	P39      logs, their rotation and a full disk (log_test.go)
//	P40      a later Stop with a shorter grace (stop_test.go), what sleeps
//	         uninterruptibly (hang_test.go)
//	P41      a dead mount delays its own container only (hang_test.go)
//	P42      updates of resources (resource_test.go)
//	P59      nothing runs after Remove (remove_test.go)
//	P61      a client that goes away (crash_test.go)
package container
