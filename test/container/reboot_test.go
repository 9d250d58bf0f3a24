package container

import "testing"

// After a reboot containers are listed as they ended, with code, reason, times and
// log, over any number of starts of the daemon, until they are removed; those that
// ran have ended with the machine.
func TestContainersAfterAReboot(t *testing.T) {
	p := newPod(t)
	ended := p.run("ended", "echo said; exit 3")
	p.wantExit(ended, 3, "Error")
	lives := p.run("lives", "echo began; "+forever)
	p.awaitLine(lives, "ready")
	was, created := p.status(ended), p.status(lives).CreatedAt
	p.Reboot()
	for range 3 {
		p.Start()
		if now := p.status(ended); now.String() != was.String() {
			t.Errorf("the container that had ended was %v\nand is %v", was, now)
		}
		now := p.status(lives)
		if now.State != exited || now.CreatedAt != created || now.FinishedAt < now.StartedAt || now.Reason == "" {
			t.Errorf("the container that ran is %v", now)
		}
		for id, line := range map[string]string{ended: "said\n", lives: "began\nready\n"} {
			if stdout, _ := p.logs(id); stdout != line {
				t.Errorf("its log is %q", stdout)
			}
		}
		if pods := len(p.list(nil)); pods != 2 {
			t.Errorf("%d containers are listed", pods)
		}
		p.Kill()
	}
	p.Start()
	check(t, p.remove(ended))
	check(t, p.remove(lives))
}
