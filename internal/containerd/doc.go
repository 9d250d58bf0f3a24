// Package containerd reads containerd's configuration, of version 2 or 3, and says in
// minicri's what a node is to be like. It is one table of keys, rules.go; what is not in
// it, and what has no counterpart, is named in a comment of the new file. The package owns
// nothing and keeps no state.
package containerd
