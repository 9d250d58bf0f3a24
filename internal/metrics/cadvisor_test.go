package metrics

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// A value that makes no metric, because of what a container is called for example, ends
// neither the daemon nor the scrape: the others are shown. Scrapes beyond the limit are
// refused.
func TestScrapeOfPods(t *testing.T) {
	measuring, measured := make(chan struct{}, mostScrapes), make(chan struct{})
	handler := cadvisor(func() []Value {
		measuring <- struct{}{}
		<-measured
		return []Value{
			{Name: "bytes", Labels: []string{"pod"}, LabelValues: []string{"not UTF-8: \xff"}},
			{Name: "bytes", Labels: []string{"pod"}, LabelValues: []string{"one", "too many"}},
			{Name: "bytes", Labels: []string{"pod"}, LabelValues: []string{"web"}, Value: 7},
		}
	}).handler()
	scrape := func() *httptest.ResponseRecorder {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics/cadvisor", http.NoBody))
		return answer
	}
	answers := make(chan *httptest.ResponseRecorder, mostScrapes)
	for range mostScrapes {
		go func() { answers <- scrape() }()
		<-measuring
	}
	if refused := scrape(); refused.Code != http.StatusServiceUnavailable {
		t.Errorf("one scrape too many: %d, want %d", refused.Code, http.StatusServiceUnavailable)
	}
	close(measured)
	for range mostScrapes {
		if answer := <-answers; answer.Code != http.StatusOK || !strings.Contains(answer.Body.String(), `bytes{pod="web"} 7`) {
			t.Errorf("%d: %s", answer.Code, answer.Body)
		}
	}
}
