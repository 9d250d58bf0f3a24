// Package server is the CRI surface of minicri: one file for each noun of the
// API. A method checks what is about the form of the request, calls the
// package that does the work, and turns the result into the API's messages.
// Nothing here mounts, starts a process or writes a file. The only state are the
// subscriptions to events (events.go) and the calls under way (drain.go), each under
// a lock of its own.
//
// Errors of the domain are turned into gRPC codes in one place, by the
// interceptors, with the one table of errors.go. Lists are streamed in pieces
// that are cut by size (pieces.go).
package server
