package metrics

// Family is a family of metrics, as docs/metrics.md describes it.
type Family struct {
	// Name begins with "minicri_".
	Name string
	// Kind is "counter", "gauge" or "histogram".
	Kind string
	Help string
	// Labels are the labels with what they may be: no set is unbounded.
	Labels []Label
}

// Label is a label of a family and its values in words.
type Label struct{ Name, Values string }

// The names of the families.
const (
	rpcSeconds     = "minicri_rpc_seconds"
	stepSeconds    = "minicri_sandbox_step_seconds"
	pluginSeconds  = "minicri_cni_plugin_seconds"
	pullSeconds    = "minicri_image_pull_seconds"
	pulledBytes    = "minicri_image_pulled_bytes_total"
	exits          = "minicri_container_exits_total"
	oomKills       = "minicri_container_oom_kills_total"
	lost           = "minicri_supervisor_restarts_total"
	dropped        = "minicri_events_dropped_total"
	sandboxCount   = "minicri_sandboxes"
	containerCount = "minicri_containers"
	pending        = "minicri_attachments_pending"
	oldestPending  = "minicri_attachments_pending_oldest_seconds"
	drifted        = "minicri_attachments_drifted"
	quarantined    = "minicri_records_quarantined"
	stuck          = "minicri_plugin_runs_stuck"
	networkReady   = "minicri_network_ready"
	streamsOpen    = "minicri_streams_open"
)

// Families are all families that this package makes, in the order of the page;
// those of the Go runtime and of the process (go_, process_: its memory, CPU and
// descriptors) are client_golang's own.
func Families() []Family {
	outcome := Label{"outcome", "ok, error"}
	return []Family{
		{rpcSeconds, "histogram", "How long each call of the CRI took.", []Label{{"method", "the methods of the CRI: RunPodSandbox"}, {"code", "the codes of gRPC: OK"}}},
		{stepSeconds, "histogram", "How long each step of a pod's or container's life took.", []Label{{"step", "the steps of pods and containers: pod/cni add"}, outcome}},
		{pluginSeconds, "histogram", "How long each run of a CNI plugin took, IPAM plugins included.", []Label{{"plugin", "the first 64 plugins that were run, and other"}, {"verb", "ADD, DEL, CHECK, STATUS, GC, VERSION, other"}, outcome}},
		{pullSeconds, "histogram", "How long each pull of an image took. Pulls that were merged count once.", []Label{outcome}},
		{pulledBytes, "counter", "Bytes of images that registries sent, of failed pulls too.", nil},
		{exits, "counter", "Containers that have ended.", []Label{{"reason", "Completed, Error, OOMKilled, StartError, Unknown, other"}}},
		{oomKills, "counter", "Containers that were killed because they, or their pod, used all of their memory.", nil},
		{lost, "counter", "Supervisors that died and were replaced.", nil},
		{dropped, "counter", "Events that a consumer was too slow for; its subscription ended with each.", nil},
		{"minicri_nri_requests_total", "counter", "Requests to NRI plugins; no rows while there are none.", []Label{{"plugin", "the NRI plugins"}, {"request", "the requests of NRI"}, {"outcome", "ok, error, timeout, lost"}}},
		{"minicri_nri_request_seconds", "histogram", "How long NRI plugins took for their answers.", []Label{{"plugin", "the NRI plugins"}, {"request", "the requests of NRI"}}},
		{"minicri_nri_plugins", "gauge", "NRI plugins that are connected.", nil},
		{sandboxCount, "gauge", "Pod sandboxes.", []Label{{"state", "ready, notready, building"}}},
		{containerCount, "gauge", "Containers.", []Label{{"state", "created, running, exited, unknown"}}},
		{pending, "gauge", "Attachments whose CNI DEL has failed and is being repeated.", nil},
		{oldestPending, "gauge", "How long ago the first DEL of the oldest of them failed; 0 without any.", nil},
		{drifted, "gauge", "Attachments that CNI CHECK found changed.", nil},
		{quarantined, "gauge", "Records of pods, containers and attachments that cannot be read.", nil},
		{stuck, "gauge", "Runs of CNI plugins whose processes were killed and did not end.", nil},
		{networkReady, "gauge", "Whether pods can be attached: 1, or 0.", nil},
		{streamsOpen, "gauge", "Sessions of exec, attach and port-forward.", nil},
	}
}

// family panics for a name that Families does not have: that is a mistake in
// the program.
func family(name string) (f Family, labels []string) {
	for _, f := range Families() {
		if f.Name == name {
			for _, label := range f.Labels {
				labels = append(labels, label.Name)
			}
			return f, labels
		}
	}
	panic("no metric " + name)
}
