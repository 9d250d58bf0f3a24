package metrics

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/test/harness"
)

// A value without a metric, for example because of the name of a container, ends neither the daemon nor the
// scrape: the others are shown. Scrapes beyond the limit are refused.
func TestScrapeOfPods(t *testing.T) {
	measuring, measured := make(chan struct{}, maxScrapes), make(chan struct{})
	metric := func(value uint64, labels ...string) *runtimeapi.Metric {
		return &runtimeapi.Metric{Name: "bytes", LabelValues: labels, Value: &runtimeapi.UInt64Value{Value: value}}
	}
	handler := cadvisor{[]*runtimeapi.MetricDescriptor{{Name: "bytes", LabelKeys: []string{"pod"}}}, func() []*runtimeapi.PodSandboxMetrics {
		measuring <- struct{}{}
		<-measured
		return []*runtimeapi.PodSandboxMetrics{{Metrics: []*runtimeapi.Metric{metric(0, "not UTF-8: \xff"), metric(0, "one", "too many"), metric(7, "web")}}}
	}}.handler()
	scrape := func() *httptest.ResponseRecorder {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics/cadvisor", http.NoBody))
		return answer
	}
	answers := make(chan *httptest.ResponseRecorder, maxScrapes)
	for range maxScrapes {
		go func() { answers <- scrape() }()
		<-measuring
	}
	refused := scrape()
	harness.Want(t, refused.Code == http.StatusServiceUnavailable, "one scrape too many: %d, want %d", refused.Code, http.StatusServiceUnavailable)
	close(measured)
	for range maxScrapes {
		answer := <-answers
		harness.Want(t, answer.Code == http.StatusOK && strings.Contains(answer.Body.String(), `bytes{pod="web"} 7`), "%d: %s", answer.Code, answer.Body)
	}
}

// A file system that counts no inodes, as procfs and btrfs, has no number of free ones: 0 would be an alert for ever.
func TestInodesThatAreNotCounted(t *testing.T) {
	for root, want := range map[string]bool{"/proc": false, t.TempDir(): true} {
		seen := map[string]bool{}
		disk(root, func(name string, _ float64, _ ...string) { seen[name] = true })
		harness.Want(t, seen["minicri_disk_free_inodes"] == want && seen["minicri_disk_size_bytes"], "%s: %v", root, seen)
	}
}

// Plugins that come under ever new names do not make ever new rows; those that were there before keep theirs.
func TestNamesOfPluginsAreBounded(t *testing.T) {
	var all names
	rows := make(map[string]bool)
	for i := range 10 * maxPlugins {
		rows[all.label(fmt.Sprint("10-plugin-", i))] = true
	}
	harness.Want(t, len(rows) == maxPlugins+1 && rows[other], "%d rows, want %d and %q", len(rows), maxPlugins, other)
	harness.Same(t, "the first plugin now", all.label("10-plugin-0"), "10-plugin-0")
}

// The address has a page with its links and a health endpoint, and nothing else.
func TestRoutes(t *testing.T) {
	routes := New().routes()
	for _, c := range []struct {
		path, has string
		code      int
	}{
		{"/", `<a href="/metrics">`, http.StatusOK},
		{"/healthz", "ok\n", http.StatusOK},
		{"/metrics", "minicri_image_pull_failures_total{reason=\"not_found\"} 0", http.StatusOK},
		{"/nothing", "not found", http.StatusNotFound},
	} {
		answer := httptest.NewRecorder()
		routes.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, c.path, http.NoBody))
		harness.Same(t, c.path, answer.Code, c.code)
		harness.Want(t, strings.Contains(answer.Body.String(), c.has), "%s: %q lacks %q", c.path, answer.Body, c.has)
	}
}

func TestReasonsOfPulls(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{errdefs.ErrNotFound, "not_found"},
		{errdefs.ErrUnauthenticated, "unauthorized"},
		{errdefs.ErrPermissionDenied, "forbidden"},
		{errdefs.ErrResourceExhausted, "rate_limited"},
		{errdefs.ErrDataLoss, "content"},
		{errdefs.ErrInvalidArgument, "invalid"},
		{image.ErrRegistryUnavailable, "unavailable"},
		{image.ErrVerification, "verification"},
		{fmt.Errorf("%w: %w", image.ErrRegistryUnavailable, &tls.CertificateVerificationError{Err: errors.New("x")}), "certificate"},
		{unix.ENOSPC, "no_space"},
		{context.Canceled, "canceled"},
		{errors.New("x"), "other"},
	} {
		harness.Same(t, fmt.Sprint(c.err), reasonOf(fmt.Errorf("pull a: %w", c.err)), c.want)
	}
}
