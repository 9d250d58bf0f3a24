// Package state keeps records on disk: one small JSON file for each object,
// in one directory for each kind of object.
//
// It owns the files below the directories that it is given and nothing else.
// A write goes to a temporary file that is renamed over the old one, so a
// reader, and a daemon that comes back after a crash, finds the old record or
// the new one, never half of one. A durable write is also on the disk when it
// returns (fsync of the file and of its directory), so that it survives a power
// cut.
//
// Every file carries the version of its schema. A record that cannot be read
// (truncated, garbage, or of no schema) is moved to the directory
// "quarantine" next to the records; it never stops the others from being read.
//
// The package holds no state in memory and no lock: writers of one record are
// kept apart by the object that the record belongs to.
package state
