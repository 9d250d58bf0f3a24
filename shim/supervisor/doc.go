// Package supervisor starts and watches the processes of a pod: pause by a
// one-shot (Pause), containers by a resident process. It is the only package
// that imports libcontainer, and owns the words in which libcontainer is spoken
// to: everything above it speaks OCI runtime-spec.
package supervisor
