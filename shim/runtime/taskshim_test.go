package runtime

import (
	"fmt"
	"os"
	"testing"
)

// Shims that have ended are forgotten, however many there were; those that run are not.
func TestShimsThatHaveEndedAreForgotten(t *testing.T) {
	self, err := openProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	r := NewTask([]string{"shim"}, t.TempDir(), false, &Builtin{children: &children{adopts: true}}, nil)
	lives := shimProcess{PID: self.PID, StartTime: self.StartTime}
	r.keepShim("lives", lives)
	for i := range 10000 {
		r.keepShim(fmt.Sprint(i), shimProcess{PID: self.PID, StartTime: self.StartTime + 1}) // its pid is another one's by now
	}
	if shim, known := r.shimAt("lives"); !known || shim != lives {
		t.Errorf("the one that runs: %v, %v", shim, known)
	}
	if len(r.shims) > leastKept+1 {
		t.Errorf("%d shims are kept, one runs", len(r.shims))
	}
}
