// Package step runs the named steps of the lives of pods and containers, and
// keeps their timelines.
//
// A Step is data: its name, the operation that it belongs to, and when it is
// left out. The packages sandbox and container each have a list of theirs, over
// which the documentation's test, the crash matrix and the metrics range. A
// Sequence is one way through some of them; around each step it does, in one
// place, all that a step has:
//
//	the name          pod/record, container/rootfs: kind and step
//	error prefix      "record: ...", under the id of the object
//	failpoints        "pod/record before", "pod/record after"
//	limit             the context's, asked for before the step begins
//	metric            by Observer
//	timeline          a Row, also of a step that failed
//	span              of package trace, where the call is traced
//
// A Timeline is what has happened to one object, step by step; Record adds rows
// to it from below, such as the runs of CNI plugins. When the object is gone, or
// could not be made, its Life goes to Lives, which keeps the last ones on disk.
//
// A Timeline has a lock, held for the moment of adding a row. Lives has one,
// held while a file is written. Neither is held while a step runs.
package step
