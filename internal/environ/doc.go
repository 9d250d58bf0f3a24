// Package environ carries variables of any bytes to a program. A specification
// is JSON, and so is what libcontainer sends its init: both change bytes that
// are not UTF-8. Kubernetes passes them on all the same, a Secret in a variable
// for example (https://github.com/kubernetes/kubernetes/issues/139132).
//
// Encode writes such values in a form that JSON keeps, for the specification.
// The supervisor asks Take for them when it starts a process: if there are any, init
// executes Program, which is given the true bytes in a file, puts them into its
// environment and executes what was asked for. A process without such values
// is started without Program.
//
// Nothing here has a state or a lock.
package environ
