// Package kind tests the node image of make kind-image with the real kind and the real Docker Engine, by docs/kind.md.
package kind

import (
	"archive/tar"
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

var (
	check = harness.Check
	same  = harness.Same[string]
	want  = harness.Want
	need  = harness.Need
)

// The tools are in PATH: hack/kind/engine.
func run(t *testing.T, script string) string {
	out, err := try(script)
	need(t, err == nil, "%v: %s: %s", err, script, out)
	return strings.TrimSpace(out)
}

func try(script string) (string, error) {
	command := exec.Command("bash", "-euo", "pipefail", "-c", script)
	command.Dir = directory
	out, err := command.CombinedOutput()
	return string(out), err
}

// directory is where the commands of the page run.
var directory string

func TestMain(m *testing.M) {
	var err error
	if directory, err = filepath.Abs("../../bin/kind/docker/page"); err == nil {
		err = os.MkdirAll(directory, 0o755)
	}
	if err == nil {
		err = os.Link("../../bin/kind/node.tar", filepath.Join(directory, "node.tar"))
	}
	if err != nil {
		panic(err)
	}
	os.Setenv("HOME", directory) // kind and kubectl write ~/.kube
	os.Exit(m.Run())
}

// page has the blocks of docs/kind.md that are left to run.
type page []string

func readPage(t *testing.T) *page {
	var p page
	block := regexp.MustCompile("(?s)```sh\n(.*?)```")
	for _, found := range block.FindAllSubmatch(harness.Read(t, "../../docs/kind.md"), -1) {
		p = append(p, string(found[1]))
	}
	return &p
}

// next runs the next block. The block contains the text.
func (p *page) next(t *testing.T, has string) string {
	need(t, len(*p) > 0 && strings.Contains((*p)[0], has), "the next block of docs/kind.md has no %q: %q", has, *p)
	block := (*p)[0]
	*p = (*p)[1:]
	return run(t, block)
}

// TestPage runs the commands of docs/kind.md in their order, and checks the cluster after each of them.
func TestPage(t *testing.T) {
	run(t, "kind delete clusters --all; "+makeImage("app:v1"))
	t.Cleanup(func() { showFailure(t) })
	p := readPage(t)

	p.next(t, "docker load")
	began := time.Now()
	p.next(t, "kind create cluster")
	t.Logf("kind create cluster: %s", time.Since(began).Round(time.Second))
	nodes := p.next(t, "get nodes")
	want(t, strings.Contains(nodes, " Ready ") && strings.Contains(nodes, "minicri://"), "the nodes are %s", nodes)
	t.Logf("memory: %s", run(t, "docker stats --no-stream --format '{{.Name}} {{.MemUsage}}'"))
	t.Logf("memory of the runtime: %s", run(t, `docker exec kind-control-plane sh -c '
		cat $(grep -lE "^Name:.(containerd|minicri)" /proc/[0-9]*/status) | grep -E "Name|VmRSS"'`))

	p.next(t, "kind load docker-image")
	run(t, "docker exec kind-control-plane ctr --namespace=k8s.io images ls -q | grep -x docker.io/library/app:v1")
	p.next(t, "kind load image-archive")
	t.Run("storage", claimsAVolume)
	t.Run("bad input", refusesBadInput)

	p.next(t, "kind export logs")
	for _, file := range []string{"containerd.log", "kubelet.log", "images.log", "journal.log"} {
		content := harness.Read(t, filepath.Join(directory, "logs/kind-control-plane", file))
		want(t, len(content) > 0, "%s is empty", file)
	}
	log := string(harness.Read(t, filepath.Join(directory, "logs/kind-control-plane/containerd.log")))
	want(t, strings.Contains(log, "minicri"), "containerd.log has nothing of minicri: %.2000s", log)

	p.next(t, "docker restart")
	t.Run("engine restart", survivesTheEngine)
	p.next(t, "kind delete cluster")
	nothingIsLeft(t)

	began = time.Now()
	p.next(t, "kind create cluster")
	t.Logf("kind create cluster with three nodes: %s", time.Since(began).Round(time.Second))
	same(t, "Ready nodes", run(t, "kubectl get nodes --no-headers | grep -cw Ready"), "3")
	t.Run("patch", translatesThePatch)
	t.Run("service and DNS", servesAcrossNodes)
	t.Run("registry", pullsFromALocalRegistry)
	p.next(t, "kind delete cluster")
	nothingIsLeft(t)
	want(t, len(*p) == 0, "blocks of docs/kind.md that were not run: %q", *p)
}

// makeImage makes an image of busybox without a registry.
func makeImage(name string) string {
	return `root=$(mktemp -d) && mkdir "$root/bin" && cp /bin/busybox "$root/bin" &&
		for applet in $(/bin/busybox --list); do [ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"; done &&
		echo home >"$root/index.html" && tar -C "$root" -c . |
		docker import --change 'CMD ["httpd", "-f", "-p", "8080", "-h", "/"]' - ` + name + ` && rm -r "$root"`
}

func claimsAVolume(t *testing.T) {
	run(t, `kubectl apply -f - <<'END'
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: disk
spec:
  accessModes: [ReadWriteOnce]
  resources:
    requests:
      storage: 1Mi
---
apiVersion: v1
kind: Pod
metadata:
  name: writer
spec:
  containers:
  - name: app
    image: app:v1
    command: [sh, -c, "echo kept >/disk/file && exec sleep 100000"]
    volumeMounts:
    - name: disk
      mountPath: /disk
  volumes:
  - name: disk
    persistentVolumeClaim:
      claimName: disk
END
kubectl wait --for=condition=Ready pod/writer --timeout=10m`)
	same(t, "the file", run(t, "kubectl exec writer -- cat /disk/file"), "kept")
	run(t, "docker exec kind-control-plane sh -c 'cat /var/local-path-provisioner/*/file'")
	run(t, "kubectl delete --now pod/writer pvc/disk")
}

// refusesBadInput gives a node unusable input: the error names the cause, and the images stay as they were.
func refusesBadInput(t *testing.T) {
	const images = "docker exec kind-control-plane ctr -n k8s.io images ls -q | sort"
	before := run(t, images)
	check(t, os.WriteFile(filepath.Join(directory, "no.tar"), []byte("no archive"), 0o600))
	check(t, otherArchitecture(filepath.Join(directory, "arm.tar")))
	for _, c := range []struct{ name, do, says string }{
		{"no archive", "kind load image-archive no.tar", "no.tar|archive"},
		{"another architecture", "kind load image-archive arm.tar", "arm64"},
		{"unknown command", "docker exec kind-control-plane ctr -n k8s.io containers ls", "minicri image.*crictl"},
		{"unknown image", "kind load docker-image missing:v1", "not present"},
		{"patch", `kind create cluster --image minicri/node --name refused --config - <<'END'
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
containerdConfigPatches:
- |-
  [plugins."io.containerd.grpc.v1.cri"]
    no_such_key = true
END`, "no_such_key"},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, err := try(c.do)
			want(t, err != nil && regexp.MustCompile(c.says).MatchString(out), "%v: %s", err, out)
		})
	}
	same(t, "the images", run(t, images), before)
	same(t, "the clusters", run(t, "kind get clusters"), "kind")
}

// otherArchitecture changes the architecture in the archive of docker save.
func otherArchitecture(file string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	out, err := exec.CommandContext(ctx, "docker", "save", "app:v1").Output()
	if err != nil {
		return err
	}
	var changed bytes.Buffer
	w := tar.NewWriter(&changed)
	for r := tar.NewReader(bytes.NewReader(out)); ; {
		header, err := r.Next()
		if err != nil {
			break // the end
		}
		var content bytes.Buffer
		if _, err := content.ReadFrom(r); err != nil {
			return err
		}
		data := bytes.ReplaceAll(content.Bytes(), []byte(`"architecture":"amd64"`), []byte(`"architecture":"arm64"`))
		if err := w.WriteHeader(header); err != nil {
			return err
		}
		if _, err := w.Write(data); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	return os.WriteFile(file, changed.Bytes(), 0o600)
}

// survivesTheEngine restarts Docker. Docker restarts the nodes.
func survivesTheEngine(t *testing.T) {
	engine, err := filepath.Abs("../../hack/kind/engine")
	check(t, err)
	run(t, engine+" stop && "+engine+" start")
	run(t, `until kubectl exec web -- true; do sleep 1; done
		kubectl wait --for=condition=Ready node --all --timeout=10m`)
}

func translatesThePatch(t *testing.T) {
	run(t, `for node in $(kind get nodes --name three); do
		docker exec $node grep -F /etc/containerd/certs.d /etc/minicri/config.toml.d/50-containerd.toml
	done`)
}

// servesAcrossNodes runs a pod on each worker. A client on the control plane reaches both by the name of their Service.
func servesAcrossNodes(t *testing.T) {
	run(t, "kind load docker-image app:v1 --name three")
	run(t, `kubectl apply -f - <<'END'
apiVersion: apps/v1
kind: Deployment
metadata:
  name: web
spec:
  replicas: 2
  selector:
    matchLabels: {app: web}
  template:
    metadata:
      labels: {app: web}
    spec:
      topologySpreadConstraints:
      - maxSkew: 1
        topologyKey: kubernetes.io/hostname
        whenUnsatisfiable: DoNotSchedule
        labelSelector:
          matchLabels: {app: web}
      containers:
      - name: web
        image: app:v1
        command: [sh, -c, "hostname >/index.html && exec httpd -f -p 8080 -h /"]
        readinessProbe:
          httpGet: {path: /index.html, port: 8080}
---
apiVersion: v1
kind: Service
metadata:
  name: web
spec:
  selector: {app: web}
  ports:
  - port: 80
    targetPort: 8080
END
kubectl rollout status deployment/web --timeout=10m
kubectl run client --image app:v1 --overrides '{"spec": {"nodeName": "three-control-plane"}}' --command -- sleep 100000
kubectl wait --for=condition=Ready pod/client --timeout=10m`)
	nodes := strings.Fields(run(t, "kubectl get pods -l app=web -o jsonpath='{.items[*].spec.nodeName}'"))
	need(t, len(nodes) == 2 && nodes[0] != nodes[1], "the pods are on %s", nodes)
	answers := map[string]bool{}
	harness.Eventually(t, "both pods answer", func() bool {
		out, err := try("kubectl exec client -- wget -q -O - http://web.default.svc.cluster.local/index.html")
		if err == nil {
			answers[strings.TrimSpace(out)] = true
		}
		return len(answers) == 2
	})
}

// pullsFromALocalRegistry configures a registry for the nodes by a file in certs.d.
func pullsFromALocalRegistry(t *testing.T) {
	run(t, `cat >registry.yml <<END
version: 0.1
storage: {filesystem: {rootdirectory: $PWD/registry}}
http: {addr: ":5001"}
END
docker-registry serve registry.yml >registry.log 2>&1 &
trap "kill $!" EXIT
docker tag app:v1 localhost:5001/app:v1
until docker push localhost:5001/app:v1; do sleep 1; done
for node in $(kind get nodes --name three); do
	gateway=$(docker exec $node ip -4 route show default | cut -d ' ' -f 3)
	file=/etc/containerd/certs.d/localhost:5001/hosts.toml
	docker exec $node mkdir -p ${file%/*}
	echo "[host.'http://$gateway:5001']" | docker exec -i $node cp /dev/stdin $file
done
kubectl run pulled --image localhost:5001/app:v1 --image-pull-policy Always
kubectl wait --for=condition=Ready pod/pulled --timeout=5m`)
}

// nothingIsLeft finds containers, volumes and cgroups of a deleted cluster. kind keeps its network.
func nothingIsLeft(t *testing.T) {
	same(t, "containers", run(t, "docker ps --all --quiet"), "")
	same(t, "volumes", run(t, "docker volume ls --quiet"), "")
	same(t, "cgroups", run(t, "find /sys/fs/cgroup -mindepth 2 -path '*/minicri-kind/*' -type d"), "")
}

func showFailure(t *testing.T) {
	if !t.Failed() {
		return
	}
	out, err := try(`docker ps --all; kubectl get pods -A -o wide --request-timeout=10s
	for node in $(docker ps --quiet); do
		docker exec $node sh -c 'minicri pods --wide; minicri timeline --failed; journalctl --no-pager -n 100'; done`)
	t.Logf("%v: %s", err, out)
}
