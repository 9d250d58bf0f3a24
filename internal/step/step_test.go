package step_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
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
	harness.Need(t, len(measured) == 3, "measured was %v", measured)
	harness.Want(t, measured["pod/record"] == nil, "measured was %v", measured)
	harness.Want(t, errors.Is(measured["pod/files"], errTest), "measured was %v", measured)
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
	harness.Eventually(t, "it has begun", func() bool { return timeline.Stage() != nil })
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
	harness.Need(t, len(rows) == 4, "the rows are %+v", rows)
	harness.Want(t, rows[2].Parent == "cni add", "the rows are %+v", rows)
	harness.Want(t, rows[3].Parent == "bridge ADD", "the rows are %+v", rows)
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
	harness.Want(t, len(rows) <= 50, "%d rows, from %v to %v", len(rows), rows[0].Step, rows[len(rows)-1].Step)
	harness.Want(t, rows[0].Step == "record", "%d rows, from %v to %v", len(rows), rows[0].Step, rows[len(rows)-1].Step)
	harness.Want(t, rows[len(rows)-1].Step == "remove record",
		"%d rows, from %v to %v", len(rows), rows[0].Step, rows[len(rows)-1].Step)
	harness.Want(t, len(rows[1].Error) <= 512,
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

func open(t *testing.T, directory string) *step.Lives {
	lives, err := step.OpenLives(directory)
	harness.Check(t, err)
	return lives
}

// life is one that ended i milliseconds after the first.
func life(i int, failure string) step.Life {
	return step.Life{
		Kind: "pod", ID: fmt.Sprintf("%064x", i), Name: "default/web", End: time.UnixMilli(1_700_000_000_000 + int64(i)), Error: failure,
		Rows: []step.Row{{Kind: "pod", Step: "record"}, {Kind: "plugin", Step: "bridge ADD", Parent: "cni add", Took: time.Second}},
	}
}

// Lives are found after a restart, the newest first, by id and by its beginning.
func TestLivesAreKeptOverRestarts(t *testing.T) {
	directory := filepath.Join(t.TempDir(), "lives")
	lives := open(t, directory)
	harness.Check(t, lives.Keep(life(1, "")))
	harness.Check(t, lives.Keep(life(0x20, "cni add: no address")))
	harness.Check(t, os.WriteFile(filepath.Join(directory, ".new-cut-off"), []byte("{"), 0o600))
	harness.Check(t, os.WriteFile(filepath.Join(directory, "1-ok-pod-garbage.json"), []byte("{"), 0o600))

	lives = open(t, directory)
	harness.Check(t, lives.Keep(life(0x30, "")))
	list, err := lives.List()
	harness.Check(t, err)
	harness.Need(t, len(list) == 3, "got %+v", list)
	harness.Want(t, list[0].ID == life(0x30, "").ID, "got %+v", list)
	harness.Want(t, list[1].Error == "cni add: no address", "got %+v", list)
	harness.Want(t, len(list[2].Rows) == 2, "got %+v", list)
	found, err := lives.Get(life(0x20, "").ID[:63])
	harness.Check(t, err)
	harness.Need(t, len(found) == 1, "found %+v", found)
	harness.Want(t, found[0].ID == life(0x20, "").ID, "found %+v", found)
	harness.Want(t, found[0].Rows[1] == life(0x20, "").Rows[1], "found %+v", found)
	_, err = os.Stat(filepath.Join(directory, ".new-cut-off"))
	harness.Want(t, errors.Is(err, os.ErrNotExist), "what a crash left of a write: %v", err)
}

// A sandbox that failed, could not be destroyed, and was removed later, has one.
func TestLifeOfAnIDIsReplaced(t *testing.T) {
	lives := open(t, t.TempDir())
	first := life(1, "failed")
	harness.Check(t, lives.Keep(first))
	first.End = first.End.Add(time.Hour)
	harness.Check(t, lives.Keep(first))
	list, err := lives.List()
	harness.Check(t, err)
	harness.Want(t, len(list) == 1 && list[0].End.Equal(first.End), "got %+v", list)
}

// The last 1000 are kept, and those that failed longer than those that did not. They take at most 8 MiB of the disk.
func TestLivesAreBounded(t *testing.T) {
	directory := t.TempDir()
	lives := open(t, directory)
	for i := range 1500 {
		failure := ""
		if i < 100 {
			failure = "it failed long ago"
		}
		l := life(i, failure)
		for range 100 {
			l.Rows = append(l.Rows, step.Row{Kind: "pod", Step: "cni del", Error: strings.Repeat("e", 500)})
		}
		harness.Check(t, lives.Keep(l))
	}
	list, err := lives.List()
	harness.Check(t, err)
	failures := 0
	for _, l := range list {
		if l.Error != "" {
			failures++
		}
	}
	harness.Need(t, len(list) == 1000, "%d are kept, %d of them failed", len(list), failures)
	harness.Want(t, failures == 100, "%d are kept, %d of them failed", len(list), failures)
	harness.Want(t, list[0].ID == life(1499, "").ID, "%d are kept, %d of them failed", len(list), failures)
	used := disk(t, directory)
	harness.Want(t, used <= 8<<20, "they take %d bytes of the disk", used)
}

func disk(t *testing.T, directory string) (bytes int64) {
	entries, err := os.ReadDir(directory)
	harness.Check(t, err)
	for _, entry := range entries {
		info, err := entry.Info()
		harness.Check(t, err)
		bytes += info.Sys().(*syscall.Stat_t).Blocks * 512
	}
	return bytes
}

// What is no file in the place of a life is skipped, and does not block.
func TestWhatIsNoFileIsNoLife(t *testing.T) {
	dir := t.TempDir()
	kept := open(t, dir)
	harness.Check(t, kept.Keep(step.Life{Kind: "pod", ID: "good", Name: "test/web", End: time.Now()}))
	names := func(i int) string {
		return filepath.Join(dir, fmt.Sprintf("%019d-failed-pod-bad%d-00000000.json", i, i))
	}
	harness.Check(t, errors.Join(syscall.Mkfifo(names(1), 0o600), os.Symlink("/dev/zero", names(2)), os.Mkdir(names(3), 0o700), os.WriteFile(names(4), []byte("{"), 0o600)))
	lives, err := kept.List()
	harness.Need(t, err == nil && len(lives) == 1, "%+v, %v", lives, err)
	harness.Want(t, lives[0].ID == "good", "%+v, %v", lives, err)
}
