package environ

import (
	"embed"
	"encoding/base64"
	"fmt"
	"strings"
	"unicode/utf8"
)

// encodedPrefix begins each value that is encoded, and no other: a value that
// begins with it by itself is encoded too.
const encodedPrefix = "\x01minicri-base64:"

// Encode returns the variables, NAME=VALUE each, with the values that JSON
// would change encoded. The list itself is not changed.
func Encode(env []string) []string {
	var encoded []string
	for i, pair := range env {
		name, value, _ := strings.Cut(pair, "=")
		if utf8.ValidString(value) && !strings.HasPrefix(value, encodedPrefix) {
			continue
		}
		if encoded == nil {
			encoded = append(encoded, env...)
		}
		encoded[i] = name + "=" + encodedPrefix + base64.StdEncoding.EncodeToString([]byte(value))
	}
	if encoded == nil {
		return env
	}
	return encoded
}

// Take returns the variables with the encoded values left empty, and those
// variables with their true bytes, as execve(2) takes them: each ends with a
// NUL. There are none if block is nil.
func Take(env []string) (plain []string, block []byte, err error) {
	for i, pair := range env {
		name, value, _ := strings.Cut(pair, "=")
		encoded, isEncoded := strings.CutPrefix(value, encodedPrefix)
		if !isEncoded {
			continue
		}
		decoded, err := base64.StdEncoding.DecodeString(encoded)
		if err != nil {
			return nil, nil, fmt.Errorf("environment variable %s: %w", name, err)
		}
		if plain == nil {
			plain = append(plain, env...)
		}
		plain[i] = name + "="
		block = append(block, name+"="...)
		block = append(append(block, decoded...), 0)
	}
	if plain == nil {
		plain = env
	}
	return plain, block, nil
}

// What Program is started with: itself and the block as descriptors, and before
// the arguments of the other program the path by which it is executed.
const (
	ProgramFD = 3
	BlockFD   = 4
	Path      = "/proc/self/fd/3"
)

// Name is the name of the process (comm of proc_pid_stat(5)) until it has become
// the other program: one that ends by this name has failed to execute it.
const Name = "minicri-environ"

// The pattern also matches environ.c, so that the package compiles before
// environ.elf is built.
//
//go:embed environ.*
var files embed.FS

// Program returns a static ELF executable of this machine's architecture. It
// fails when the shim was compiled before environ.elf was built.
func Program() ([]byte, error) {
	elf, err := files.ReadFile("environ.elf")
	if err != nil {
		return nil, fmt.Errorf("the program environ is not built in, run `make build`: %w", err)
	}
	return elf, nil
}
