package hostile

import (
	"os"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }
