package harness

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
)

// recorder is a test whose errors are wanted.
type recorder struct {
	testing.TB
	errors []string
}

func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}

// What prints alike is not the same.
func TestSame(t *testing.T) {
	for _, pair := range [][2]any{{[]string{""}, []string(nil)}, {[]string{"a b"}, []string{"a", "b"}}, {1, "1"}, {error(nil), "<nil>"}} {
		Want(t, !same(pair[0], pair[1]), "%#v and %#v are the same", pair[0], pair[1])
	}
	Want(t, same([]int{}, []int(nil)), "a list of nothing is not none")
}

// What fails in a function of a test is told with the lines that led there.
func TestFailureNamesItsCallers(t *testing.T) {
	r := &recorder{TB: t}
	Want(r, false, "direct")
	func() { Want(r, false, "below") }()
	WantError(r, nil)
	Want(t, len(r.errors) == 3 && r.errors[0] == "direct" && !strings.Contains(r.errors[2], "(by") &&
		regexp.MustCompile(`^below \(by harness_test\.go:\d+, harness_test\.go:\d+\)$`).MatchString(r.errors[1]), "failures are %q", r.errors)
}
