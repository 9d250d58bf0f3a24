package step_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/test/harness"
)

var errTest = errors.New("it broke")

func nothing(context.Context) error { return nil }

func fails(context.Context) error { return errTest }

func TestSequenceEndsAtTheFirstError(t *testing.T) {
	timeline := step.NewTimeline(nil)
	measured := make(map[step.Name]error)
	steps := step.Begin(t.Context(), func(name step.Name, _ time.Duration, err error) { measured[name] = err }, timeline)
	steps.Step("pod/record", nothing)
	steps.Step("pod/files", fails)
	steps.Step("pod/netns", func(context.Context) error { t.Error("a step ran after the error"); return nil })
	err := steps.Err()
	harness.Want(t, errors.Is(err, errTest) && err.Error() == "files: it broke", "got %v", err)
	harness.Check(t, steps.Do("pod/end pause", nothing))
	rows := timeline.Rows()
	harness.Same(t, "the timeline", names(rows), []string{"pod/record", "pod/files", "pod/end pause"})
	harness.Want(t, rows[0].Error == "" && rows[1].Error == "it broke", "the rows say %+v", rows)
	harness.Want(t, len(measured) == 3 && measured["pod/record"] == nil && errors.Is(measured["pod/files"], errTest),
		"measured was %v", measured)
}

func names(rows []step.Row) (names []string) {
	for _, row := range rows {
		names = append(names, row.Kind+"/"+row.Step)
	}
	return names
}

// Bound keeps no limit of the caller, and ends with the base, by its cause.
func TestBoundEndsWithTheBase(t *testing.T) {
	caller, gone := context.WithCancel(t.Context())
	gone()
	base, end := context.WithCancelCause(t.Context())
	ctx, cancel := step.Bound(caller, base, time.Hour)
	defer cancel()
	harness.Want(t, ctx.Err() == nil, "it ended with its caller: %v", ctx.Err())
	end(errTest)
	<-ctx.Done()
	cause := context.Cause(ctx)
	harness.Want(t, errors.Is(cause, errTest), "the cause is %v", cause)
}

// An async step is joined even after another one has failed, and its row stands where it began.
func TestAsyncStepIsJoined(t *testing.T) {
	timeline := step.NewTimeline(nil)
	steps := step.Begin(t.Context(), nil, timeline)
	ended := make(chan struct{})
	prepared := steps.Async("pod/prepare", func(context.Context) error { <-ended; return errTest })
	for timeline.Stage() == nil { // until it has begun
		time.Sleep(time.Millisecond)
	}
	failure := errors.New("no address")
	steps.Step("pod/cni add", func(context.Context) error { return failure })
	close(ended)
	steps.Join(prepared)
	err := steps.Err()
	harness.Want(t, errors.Is(err, failure) && errors.Is(err, errTest), "got %v", err)
	harness.Same(t, "the timeline", names(timeline.Rows()), []string{"pod/prepare", "pod/cni add"})
	steps.Join(steps.Async("pod/start", func(context.Context) error { t.Error("it ran"); return nil }))
}

// What runs below a step adds rows with the step as their parent.
func TestRowsFromBelow(t *testing.T) {
	timeline := step.NewTimeline([]step.Row{{Kind: "pod", Step: "record"}})
	steps := step.Begin(t.Context(), nil, timeline)
	steps.Step("pod/cni add", func(ctx context.Context) error {
		stage := timeline.Stage()
		harness.Want(t, stage != nil && stage.Step == "cni add", "the stage is %+v", stage)
		step.Record(ctx, step.Row{Kind: "plugin", Step: "bridge ADD", Start: time.Now()})
		step.Record(ctx, step.Row{Kind: "plugin", Step: "host-local ADD", Start: time.Now(), Parent: "bridge ADD"})
		return nil
	})
	rows := timeline.Rows()
	harness.Want(t, len(rows) == 4 && rows[2].Parent == "cni add" && rows[3].Parent == "bridge ADD", "the rows are %+v", rows)
	harness.Want(t, timeline.Stage() == nil, "still under way: %+v", timeline.Stage())
	step.Record(t.Context(), step.Row{}) // outside of a step: no timeline, no harm
}

// A timeline keeps its first rows and its last ones.
func TestTimelineIsBounded(t *testing.T) {
	timeline := step.NewTimeline(nil)
	steps := step.Begin(t.Context(), nil, timeline)
	steps.Step("pod/record", nothing)
	for range 1000 {
		_ = steps.Do("pod/cni del", func(context.Context) error { return errors.New(strings.Repeat("x", 10000)) })
	}
	_ = steps.Do("pod/remove record", nothing)
	rows := timeline.Rows()
	harness.Want(t, len(rows) <= 50 && rows[0].Step == "record" && rows[len(rows)-1].Step == "remove record" && len(rows[1].Error) <= 512,
		"%d rows, from %v to %v", len(rows), rows[0].Step, rows[len(rows)-1].Step)
}

// The error of a step that ran into the limit says how long that was, wherever below the error comes from.
func TestLimitIsNamed(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{context.DeadlineExceeded, "not done within 1ms: context deadline exceeded"},
		{fmt.Errorf("ask the shim: %w", context.DeadlineExceeded), "ask the shim: not done within 1ms: context deadline exceeded"},
		{errors.New("no room"), "no room"},
	} {
		ctx, cancel := step.Bound(t.Context(), t.Context(), time.Millisecond)
		steps := step.Begin(ctx, nil, step.NewTimeline(nil))
		steps.Step("pod/create", func(ctx context.Context) error {
			<-ctx.Done()
			return c.err
		})
		cancel()
		if err := steps.Err(); err == nil || !strings.HasSuffix(err.Error(), c.want) || strings.Count(err.Error(), "not done") > 1 || errors.Is(err, context.DeadlineExceeded) != errors.Is(c.err, context.DeadlineExceeded) {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
}

// The error of a step that was cancelled says by whom, and is of that kind.
func TestCauseOfACancellationIsNamed(t *testing.T) {
	ending := errors.New("minicri is shutting down")
	for _, err := range []error{context.Canceled, fmt.Errorf("ask the shim: %w", context.Canceled)} {
		ctx, cancel := context.WithCancelCause(t.Context())
		steps := step.Begin(ctx, nil, step.NewTimeline(nil))
		steps.Step("pod/create", func(context.Context) error {
			cancel(ending)
			return err
		})
		if err := steps.Err(); !errors.Is(err, ending) || errors.Is(err, context.Canceled) || !strings.HasSuffix(err.Error(), ": minicri is shutting down") {
			t.Error(err)
		}
	}
}
