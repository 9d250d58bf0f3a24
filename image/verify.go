package image

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/containerd/containerd/v2/pkg/imageverifier/bindir"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// verify asks every executable of the verifier directory, by containerd's
// bindir protocol (docs/image-verification.md): arguments -name and -digest, the
// descriptor on stdin, exit code 0 for yes and the reason on stdout.
//
// A directory that is configured but missing or empty is a no: someone meant
// images to be verified.
func (s *Store) verify(ctx context.Context, ref Reference, target ocispec.Descriptor) error {
	dir := s.settings().VerifierDir
	if dir == "" {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("%w: read verifiers: %w", ErrVerification, err)
	}
	if len(entries) == 0 {
		return fmt.Errorf("%w: no verifier in %s", ErrVerification, dir)
	}
	config := &bindir.Config{BinDir: dir, MaxVerifiers: -1} // all of them
	setDuration(&config.PerVerifierTimeout, s.settings().VerifierTimeout)
	verifier := bindir.NewImageVerifier(config)
	judgement, err := verifier.VerifyImage(ctx, ref.String(), target)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrVerification, err)
	}
	if !judgement.OK {
		return fmt.Errorf("%w: %s", ErrVerification, judgement.Reason)
	}
	return nil
}

// setDuration sets a field whose type has a name that is internal to its module.
func setDuration[T ~int64](field *T, d time.Duration) { *field = T(d) }
