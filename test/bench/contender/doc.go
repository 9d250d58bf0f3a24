// Package contender runs the runtimes that a benchmark compares: minicri, and
// the containerd that is installed on the machine. Each has a directory of its
// own; both run in the namespaces of the caller, which hack/in-netns makes.
//
// A Runtime is one that can be started; its Process serves a socket in its
// directory. A Node is a started one that has the benchmark's images and runs
// pods; it has one owner, who closes it. Nothing here is locked: a benchmark
// does one thing at a time, so that nothing else is measured.
package contender
