package failpoint

import "context"

type hook struct{}

// With returns a context whose daemon calls hit at each point, instead of Hit: for tests in one process.
func With(ctx context.Context, hit func(point string) error) context.Context {
	return context.WithValue(ctx, hook{}, hit)
}

// From returns what the daemon of a context calls at each point.
func From(ctx context.Context) func(point string) error {
	if hit, has := ctx.Value(hook{}).(func(point string) error); has {
		return hit
	}
	return Hit
}
