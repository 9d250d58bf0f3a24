// Package crilog writes a container's output in the CRI log format:
//
//	2006-01-02T15:04:05.999999999Z stdout F the line\n
//
// A Log is a container's file, shared by its streams; a Stream cuts what it is given into lines. Lines longer
// than MaxLine become P entries and a final F; a last line without a newline is a P entry.
//
// Log.mu guards the file and the counts of what was lost; a Stream is used by one goroutine.
//
// Writing never fails the container. What the disk does not take is counted, and the log says so once there
// is space again.
package crilog
