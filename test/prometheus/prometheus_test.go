// Package prometheus asks a real Prometheus (Debian's) each query of the dashboard hack/grafana.json, over what a
// real daemon shows: a target of its own, make test-prometheus.
package prometheus

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/metrics"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

func TestMain(m *testing.M) { os.Exit(nodetest.Main(m)) }

const (
	target = "127.0.0.1:19440"
	server = "127.0.0.1:19090"
)

// queries are those of the dashboard, with the titles of their panels.
func queries(t *testing.T) map[string]string {
	data := harness.Read(t, "../../hack/grafana.json")
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	harness.Check(t, json.Unmarshal(data, &dashboard))
	found := make(map[string]string)
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			found[panel.Title] = target.Expr
		}
	}
	return found
}

// get asks an HTTP server in the node's network namespace.
func get(n *nodetest.Node, address string) (body []byte, err error) {
	dial := func(_ context.Context, _, address string) (net.Conn, error) { return n.Dial(address) }
	client := http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial}}
	answer, err := client.Get(address)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	return io.ReadAll(answer.Body)
}

// live makes something of everything that is counted.
func live(t *testing.T, n *nodetest.Node) {
	n.ImportBusybox()
	pod := n.PodConfig("web")
	id := n.RunPod(pod)
	for name, script := range map[string]string{"fine": "exit 0", "oom": "exec tail /dev/zero"} {
		c := nodetest.Container(name, "/bin/sh", "-c", script)
		c.Linux.Resources.MemoryLimitInBytes = 16 << 20
		n.RunContainer(id, pod, c)
	}
	_, _ = n.Image.PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: "127.0.0.1:1/a:1"}}) // fails
	_, _ = n.Runtime.StopContainer(t.Context(), &runtimeapi.StopContainerRequest{ContainerId: ""})                              // fails
}

func TestAlertingRules(t *testing.T) {
	output, err := exec.Command("promtool", "check", "rules", "../../hack/alerts.yml").CombinedOutput()
	harness.Want(t, err == nil, "%v: %s", err, output)
}

func TestEveryQueryOfTheDashboard(t *testing.T) {
	n := nodetest.New(t, nodetest.Config("metrics_address = '"+target+"'\n"))
	live(t, n)
	shown := families(t, n)
	startPrometheus(t, n)
	n.RemovePod(n.RunPod(n.PodConfig("later"))) // so that rates are not of nothing
	for title, query := range queries(t) {
		for _, name := range metrics.Families() {
			harness.Want(t, !strings.Contains(query, name.Name) || shown[name.Name], "%s: the daemon does not show %s", title, name.Name)
		}
		mayBeEmpty := strings.Contains(query, "error") || strings.Contains(query, "code!=") // nothing has failed twice
		harness.Eventually(t, title+": "+query, func() bool {
			results, err := ask(n, query)
			harness.Need(t, err == nil, "%s: %v", title, err)
			return results > 0 || mayBeEmpty
		})
	}
}

// families are the names that the daemon shows; each of its own is on the page, and each of the page is shown.
func families(t *testing.T, n *nodetest.Node) map[string]bool {
	t.Helper()
	shown := make(map[string]bool)
	harness.Eventually(t, "both containers have ended", func() bool {
		text, err := get(n, "http://"+target+"/metrics")
		harness.Check(t, err)
		for line := range strings.Lines(string(text)) {
			if name, ok := strings.CutPrefix(line, "# TYPE "); ok {
				shown[strings.Fields(name)[0]] = true
			}
		}
		return strings.Contains(string(text), `minicri_container_exits_total{reason="OOMKilled"} 1`) && strings.Contains(string(text), `reason="Completed"} 1`)
	})
	known := make(map[string]bool)
	for _, f := range metrics.Families() {
		known[f.Name] = true
		if !shown[f.Name] && !strings.HasPrefix(f.Name, "minicri_nri_") { // there is no plugin
			t.Errorf("the page has %s, which the daemon does not show", f.Name)
		}
	}
	for name := range shown {
		harness.Want(t, !strings.HasPrefix(name, "minicri_") || known[name], "the daemon shows %s, which the page does not have", name)
	}
	return shown
}

func startPrometheus(t *testing.T, n *nodetest.Node) {
	dir := t.TempDir()
	const config = "global: {scrape_interval: 1s}\nscrape_configs: [{job_name: minicri, static_configs: [{targets: ['" + target + "']}]}]\n"
	harness.Check(t, os.WriteFile(dir+"/prometheus.yml", []byte(config), 0o600))
	command := exec.Command("prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--web.listen-address="+server)
	command.Dir = dir
	var said bytes.Buffer
	command.Stdout, command.Stderr = &said, &said
	n.RunInNetns(command.Start)
	t.Cleanup(func() {
		_, _ = command.Process.Kill(), command.Wait()
		if t.Failed() {
			t.Logf("prometheus:\n%s", &said)
		}
	})
	harness.Eventually(t, "Prometheus has scraped twice", func() bool {
		results, err := ask(n, `count_over_time(minicri_network_ready[1m]) > 1`)
		return err == nil && results > 0
	})
}

// ask counts the series that a query gives.
func ask(n *nodetest.Node, query string) (results int, err error) {
	data, err := get(n, "http://"+server+"/api/v1/query?query="+url.QueryEscape(query))
	if err != nil {
		return 0, err
	}
	var answer struct {
		Status, Error string
		Data          struct{ Result []any }
	}
	if err := json.Unmarshal(data, &answer); err != nil {
		return 0, err
	}
	if answer.Status != "success" {
		return 0, fmt.Errorf("%s: %s", query, answer.Error)
	}
	return len(answer.Data.Result), nil
}
