package container

import (
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// Every signal of the CRI has a number, and that has one name, which is always the same: some have two.
func TestSignalNames(t *testing.T) {
	for value, name := range runtimeapi.Signal_name {
		if value == 0 {
			continue
		}
		number, known := signalNumber(strings.TrimPrefix(name, "SIGNAL_"))
		harness.Want(t, known, "%s has no number", name)
		shown := signalEnum(number)
		for range 20 {
			again := signalEnum(number)
			harness.Need(t, again == shown, "signal %d is %v, and then %v", number, shown, again)
		}
		again, known := signalNumber(strings.TrimPrefix(shown.String(), "SIGNAL_"))
		harness.Want(t, known && again == number, "%s is signal %d, which is shown as %v", name, number, shown)
	}
	harness.Same(t, "signal 0 is shown as", signalEnum(0), runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT)
}
