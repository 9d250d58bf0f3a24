// Package id names sandboxes and containers: 64 hexadecimal digits, made at
// random and never given twice. Every path and every name in the kernel follows
// from an id. The package keeps no state.
package id

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
)

// New makes an id.
func New() string {
	var id [32]byte
	_, _ = rand.Read(id[:]) // never fails (crypto/rand)
	return hex.EncodeToString(id[:])
}

// Find returns what has the id, or the only thing whose id starts so, among
// what is listed: people type the first digits. The kind is for the error:
// errdefs.ErrNotFound if there is none, ErrInvalidArgument if it is not clear.
func Find[T any](things map[string]T, kind, id string, listed func(T) bool) (found T, err error) {
	var none T
	if id == "" {
		return none, fmt.Errorf("%s id is empty: %w", kind, errdefs.ErrInvalidArgument)
	}
	if thing, exact := things[id]; exact && listed(thing) {
		return thing, nil
	}
	matches := 0
	for full, thing := range things {
		if listed(thing) && strings.HasPrefix(full, id) {
			found = thing
			matches++
		}
	}
	switch matches {
	case 0:
		return none, fmt.Errorf("%s %q: %w", kind, id, errdefs.ErrNotFound)
	case 1:
		return found, nil
	default:
		return none, fmt.Errorf("%s id %q is the start of several: %w", kind, id, errdefs.ErrInvalidArgument)
	}
}
