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
// Every file carries the version of its schema. A record that cannot be decoded
// (truncated, garbage, or of no schema) is moved to the directory "quarantine" next
// to the records; one that cannot be read now stays where it is. Neither stops the
// others from being read.
//
// The package has no lock, and no state in memory but the ids that Objects leaves
// alone: writers of one record are kept apart by the object that it belongs to.
package state
