// Package inspect shows people what a node is doing: the lives of its pods, their
// state and costs, and what the daemon itself is doing. A daemon serves it on a
// socket that is for root alone (DebugSocket), and Files answers from the files
// where none runs. It changes nothing but what `minicri check --fix` asks for,
// keeps no state, and waits for no lock of a pod. Secrets are left out by packages
// timeline and redact.
package inspect
