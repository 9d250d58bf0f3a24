package harness

import (
	"encoding/json"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Info decodes one key of the verbose Status; a list is in an object there.
func Info[T any](t testing.TB, n *Node, key string) (value T) {
	t.Helper()
	answer, err := n.Runtime.Status(Limited(t, time.Minute), &runtimeapi.StatusRequest{Verbose: true})
	Check(t, err)
	said := []byte(answer.GetInfo()[key])
	var list struct{ Items json.RawMessage }
	if json.Unmarshal(said, &list) == nil && list.Items != nil {
		said = list.Items
	}
	if len(said) > 0 {
		Check(t, json.Unmarshal(said, &value))
	}
	return value
}
