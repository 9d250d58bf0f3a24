package process

import "sync"

// mostSaid is how much Said keeps, in bytes.
const mostSaid = 64 << 10

// Said keeps the beginning of what a program writes, and lets it write the rest:
// one that floods its output costs no memory.
type Said struct {
	mu   sync.Mutex
	kept []byte
}

// Write takes all of p.
func (s *Said) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kept = append(s.kept, p[:min(len(p), mostSaid-len(s.kept))]...)
	return len(p), nil
}

// Bytes are what is kept.
func (s *Said) Bytes() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]byte(nil), s.kept...)
}

// String is Bytes as text.
func (s *Said) String() string { return string(s.Bytes()) }
