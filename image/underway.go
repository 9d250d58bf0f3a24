package image

import (
	"slices"
	"sync"
	"time"
)

// PullUnderWay describes a pull that has not ended.
type PullUnderWay struct {
	Reference string        `json:"reference"`
	Since     time.Time     `json:"since"`
	Took      time.Duration `json:"took"`  // until now
	Done      int64         `json:"done"`  // bytes of its blobs that are on the node
	Total     int64         `json:"total"` // bytes of the known blobs, 0 before the registry has answered
	Stage     string        `json:"stage"` // "asking the registry", "downloading" or "unpacking"
}

// pullsUnderWay is the set of pulls that have not ended. Its lock is held to read and change the set.
type pullsUnderWay struct {
	mu    sync.Mutex
	pulls map[*pulling]struct{}
}

// enter adds a pull. leave removes it.
func (u *pullsUnderWay) enter(p *pulling) (leave func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.pulls == nil {
		u.pulls = make(map[*pulling]struct{})
	}
	u.pulls[p] = struct{}{}
	return func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		delete(u.pulls, p)
	}
}

// PullsUnderWay returns the pulls that have not ended, the oldest first.
func (s *Store) PullsUnderWay() []PullUnderWay {
	s.underWay.mu.Lock()
	pulls := make([]*pulling, 0, len(s.underWay.pulls))
	for p := range s.underWay.pulls {
		pulls = append(pulls, p)
	}
	s.underWay.mu.Unlock()
	all := make([]PullUnderWay, 0, len(pulls))
	for _, p := range pulls {
		all = append(all, p.describe())
	}
	slices.SortFunc(all, func(a, b PullUnderWay) int { return a.Since.Compare(b.Since) })
	return all
}

func (p *pulling) describe() PullUnderWay {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := PullUnderWay{
		Reference: p.ref.String(), Since: p.began, Took: time.Since(p.began), Stage: "asking the registry",
	}
	for _, blob := range p.blobs {
		d.Total += blob.Total
		switch blob.Stage {
		case StageDownload:
			d.Done += min(blob.Done, blob.Total) // a registry may send more than it announced
			d.Stage = string(StageDownload)
		default:
			d.Done += blob.Total
		}
		if d.Stage != string(StageDownload) {
			d.Stage = string(StageUnpack)
		}
	}
	return d
}
