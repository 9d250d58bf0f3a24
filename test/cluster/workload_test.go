package cluster

import (
	"fmt"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
)

// web is a Deployment of web servers on both nodes, with a Service.
const web = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 4
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app: web}}}
      containers:
      - name: main
        image: IMAGE
        command: [agnhost, netexec, --http-port=8080, --udp-port=8081]
        readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: 8080}]
`

func TestDeploymentOverBothNodes(t *testing.T) {
	s := newSpace(t)
	s.apply(web)
	s.kubectl("rollout", "status", "deployment/web", "--timeout=3m")
	nodes := make(map[string]int)
	pods := s.pods("web")
	for _, pod := range pods {
		nodes[pod.Spec.NodeName]++
	}
	same(t, "nodes", fmt.Sprint(nodes), "map[node1:2 node2:2]")
	// Each pod reaches each other one, and is seen with its own address.
	for _, from := range pods {
		for _, to := range pods {
			seen := s.sh(from.Name, "wget -qO- http://"+to.Status.PodIP+":8080/clientip")
			if from.Name != to.Name && !strings.HasPrefix(seen, from.Status.PodIP+":") {
				t.Errorf("%s on %s is seen by %s on %s as %s", from.Status.PodIP, from.Spec.NodeName, to.Name, to.Spec.NodeName, seen)
			}
		}
	}
	s.kubectl("set", "env", "deployment/web", "VERSION=2")
	s.kubectl("rollout", "status", "deployment/web", "--timeout=3m")
	s.kubectl("scale", "deployment/web", "--replicas=1")
	eventually(t, "one pod is left", func() bool { return len(s.pods("web")) == 1 })
}

func TestService(t *testing.T) {
	s := newSpace(t)
	s.apply(web)
	s.run("client", "sleep 1000", "nodeName: "+node2+"\n")
	s.kubectl("rollout", "status", "deployment/web", "--timeout=3m")
	s.ready("client")
	service, err := read[corev1.Service]("/api/v1/namespaces/" + s.name + "/services/web")
	if err != nil {
		t.Fatal(err)
	}
	endpoints := make(map[string]bool)
	for range 30 {
		endpoints[s.sh("client", "wget -qO- http://"+service.Spec.ClusterIP+"/hostname")] = true
	}
	if len(endpoints) < 2 {
		t.Errorf("30 requests to the ClusterIP went to %v only", endpoints)
	}
	for _, name := range []string{"web", "web." + s.name, "web." + s.name + ".svc.cluster.local"} {
		contains(t, name, s.sh("client", "wget -qO- http://"+name+"/hostname"), "web-")
	}
	for _, from := range []string{node1, node2} {
		for _, to := range []string{"172.30.0.11", "172.30.0.12"} {
			address := fmt.Sprintf("http://%s:%d/hostname", to, service.Spec.Ports[0].NodePort)
			contains(t, from+" to "+address, onNode(t, from, "busybox wget -qO- "+address), "web-")
		}
	}
}

func TestJobs(t *testing.T) {
	s := newSpace(t)
	s.apply(`
apiVersion: batch/v1
kind: Job
metadata: {name: good}
spec:
  completions: 4
  parallelism: 2
  template:
    spec:
      restartPolicy: Never
      containers: [{name: main, image: IMAGE, command: [sh, -c, "echo done"]}]
---
apiVersion: batch/v1
kind: Job
metadata: {name: bad}
spec:
  backoffLimit: 1
  template:
    spec:
      restartPolicy: Never
      containers: [{name: main, image: IMAGE, command: [sh, -c, "exit 3"]}]
`)
	s.awaitJob("good", batchv1.JobComplete)
	job := s.awaitJob("bad", batchv1.JobFailed)
	same(t, "failed pods", job.Status.Failed, 2)
	for _, pod := range s.pods("") {
		end := pod.Status.ContainerStatuses[0].State.Terminated
		if want := map[string]int32{"good": 0, "bad": 3}[pod.Labels["job-name"]]; end == nil || end.ExitCode != want {
			t.Errorf("%s: %v, want exit code %d", pod.Name, end, want)
		}
	}
}

func (s *space) awaitJob(name string, condition batchv1.JobConditionType) *batchv1.Job {
	s.t.Helper()
	var job batchv1.Job
	eventually(s.t, fmt.Sprintf("job %s is %s", name, condition), func() bool {
		var err error
		if job, err = read[batchv1.Job]("/apis/batch/v1/namespaces/" + s.name + "/jobs/" + name); err != nil {
			s.t.Fatal(err)
		}
		for _, c := range job.Status.Conditions {
			if c.Type == condition && c.Status == corev1.ConditionTrue {
				return true
			}
		}
		return false
	})
	return &job
}

func TestCronJob(t *testing.T) {
	s := newSpace(t)
	s.apply(`
apiVersion: batch/v1
kind: CronJob
metadata: {name: minutely}
spec:
  schedule: "* * * * *"
  jobTemplate:
    spec:
      template:
        metadata: {labels: {app: minutely}}
        spec:
          restartPolicy: OnFailure
          containers: [{name: main, image: IMAGE, command: [sh, -c, "echo on time"]}]
`)
	eventually(t, "a pod of it has ended well", func() bool {
		pods := s.pods("minutely")
		return len(pods) > 0 && pods[0].Status.Phase == corev1.PodSucceeded
	})
	same(t, "log", s.kubectl("logs", s.pods("minutely")[0].Name), "on time\n")
}

func TestStatefulSet(t *testing.T) {
	s := newSpace(t)
	s.apply(`
apiVersion: v1
kind: Service
metadata: {name: db}
spec: {clusterIP: None, selector: {app: db}, ports: [{port: 8080}]}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  serviceName: db
  replicas: 2
  selector: {matchLabels: {app: db}}
  template:
    metadata: {labels: {app: db}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: main, image: IMAGE, command: [agnhost, netexec, --http-port=8080], readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}}]
`)
	s.kubectl("rollout", "status", "statefulset/db", "--timeout=3m")
	reach := func(from, to string) {
		t.Helper()
		eventually(t, from+" reaches "+to+" by its name", func() bool {
			out, err := s.try("exec", from, "--", "sh", "-c", "wget -qO- http://"+to+".db:8080/hostname")
			return err == nil && strings.HasSuffix(out, to)
		})
	}
	reach("db-0", "db-1")
	reach("db-1", "db-0")
	before := s.pod("db-0")
	s.kubectl("delete", "pod", "db-0")
	s.await("db-0", "is another pod, and ready", func(pod *corev1.Pod) bool { return pod.UID != before.UID && isReady(pod) })
	same(t, "hostname", s.sh("db-0", "hostname"), "db-0\n")
	reach("db-1", "db-0")
}
