// Package stream tests exec, attach and port-forward with the clients that
// kubectl uses, client-go's, against the real daemon.
package stream
