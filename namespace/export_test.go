package namespace

// PID is that of the process, for the tests.
func (h *Holder) PID() int { return h.command.Process.Pid }
