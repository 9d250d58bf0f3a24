package spdy

import "time"

// Small frames are taken at 16 in a millisecond at most: one that has to be
// handled costs the same with a byte as with 32 KiB, and a session that sends
// them without end would keep a processor to itself.
const (
	burst      = 64
	burstTime  = 4 * time.Millisecond
	burstBytes = burst << 10 // frames with more are not small
)

// Pace holds back the reader of a connection whose client sends small frames
// faster than a person types or a client asks. It is for one goroutine; the zero value is
// ready.
type Pace struct {
	frames, bytes int
	began         time.Time
}

// Took notes a frame with that many bytes, and waits if it comes too early. While
// it waits, the processor is free; to yield would not do, as the Go scheduler then
// looks for other clients' data only every 10 ms.
func (p *Pace) Took(bytes int) {
	p.frames++
	p.bytes += bytes
	if p.frames < burst {
		return
	}
	if p.bytes < burstBytes {
		time.Sleep(burstTime - time.Since(p.began))
	}
	*p = Pace{began: time.Now()}
}
