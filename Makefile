# minicri: `make demo` shows it, `make test` proves it. Both do all the set-up.

PREFIX  ?= /usr/local
DESTDIR ?=

bindir   = $(DESTDIR)$(PREFIX)/bin
sharedir = $(DESTDIR)$(PREFIX)/share
libdir   = $(DESTDIR)$(PREFIX)/lib
confdir  = $(DESTDIR)/etc

VERSION := $(shell hack/version)

export GOFLAGS := $(shell hack/goflags)

# The version is stamped by -X.
gobuild  = go build -ldflags "-s -w -X main.version=$(VERSION)"
# The content of its program identifies a supervisor: without a version and a build id, two
# builds of the same sources are the same. It is static, libseccomp and libc too, so that a
# release runs on any distribution.
shimbuild = go build -ldflags "-s -w -buildid= -extldflags=-static"

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^[a-z0-9%-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Asked first: nobody should wait for a build to learn this.
.PHONY: root
root:
	@[ "$$(id -u)" -eq 0 ] || { echo 'This needs root: it makes real namespaces, mounts, links and cgroups.' >&2; exit 1; }

.PHONY: demo
demo: root setup build bin/demo ## Run pods, kill and restart the daemon, remove all, count what is left (root)
	bin/demo

# Minutes: no kernel, no Kubernetes, no race detector. hack/parts.txt lists the parts.
.PHONY: test
test: root setup test-deps build failpoints bin/networks/.built bin/test/report bin/tools/.lint ## Lint, the tests of all packages, and wiring tests on the real kernel (root)
	hack/parts vet
	hack/parts lint units wiring

# Parts that have passed on this tree are not run again, unless FRESH=1. PARTS names some
# of them. It appends the results to a file of the day in test/results.
PARTS ?= $(shell awk '$$2 == "ci" || $$2 == "all" { print $$1 }' hack/parts.txt)

.PHONY: test-all
test-all: root setup bench-deps build failpoints bin/networks/.built bin/demo bin/cluster bin/test/report bin/tools/.lint ## All the rest, hours: guest, attacks, whole crash matrix, critest, Kubernetes (root)
	$(if $(FRESH),,RESUME=1) hack/parts vet
	$(if $(FRESH),,RESUME=1) RECORD=1 hack/parts $(PARTS)

.PHONY: test-crash
test-crash: root setup build failpoints bin/test/report ## Kill the daemon at every step of a pod's life; all cases (root)
	hack/test vet crash-whole

CYCLES ?= 10000

.PHONY: test-stream
test-stream: root setup build ## 10000 clients of exec, attach and port-forward that go away at random moments (root)
	CYCLES=$(CYCLES) hack/test stream

.PHONY: test-supervisor
test-supervisor: root setup test-deps build bin/test/report ## Kill and stop the supervisor under many pods (root)
	hack/test vet supervisor

# A run takes as long as the container tests do: some 10 minutes.
.PHONY: test-runtimes
test-runtimes: root setup test-deps build failpoints ## The container tests with RUNTIME=builtin, runc, crun or runsc below (root)
	hack/test-runtimes $(RUNTIME)

.PHONY: test-prometheus
test-prometheus: root setup build ## Ask a real Prometheus every query of hack/grafana.json (root)
	hack/test prometheus

FUZZ ?= 30s

.PHONY: fuzz
fuzz: root packages ## Fuzz what is parsed from outside; FUZZ=10m for longer (root)
	FUZZ=$(FUZZ) hack/fuzz

SOAK ?= 5m

.PHONY: soak
soak: root setup build ## Pods come and go while the daemon is killed at random; SOAK=10m for longer (root)
	SOAK=$(SOAK) hack/test soak

.PHONY: critest
critest: root setup build bin/critest/.built ## The CRI's own suite, critest; CRITEST_FOCUS=PATTERN for a part of it (root)
	hack/test critest

bin/critest/.built: hack/critest/go.mod hack/critest/go.sum hack/critest/build $(wildcard test/critest/replica/*) test/critest/digest.txt
	hack/critest/build
	@touch $@

# The agents' own functions, which tests apply to containers.
bin/agents: hack/agents/go.mod hack/agents/go.sum hack/agents/main.go
	CGO_ENABLED=0 go build -C hack/agents -o $(CURDIR)/$@ .

bin/test/report: $(wildcard hack/report/*.go)
	CGO_ENABLED=0 go build -o $@ ./hack/report

# Without CMD it is the demo. Killed, make leaves nobody to end what it started.
.PHONY: um
um: root $(if $(CMD),packages,setup build bin/demo) ## Run CMD='...' on a machine with cgroup v2, systemd and AppArmor (root)
	@CMD="$${CMD:-bin/demo}" && exec setpriv --pdeathsig TERM hack/um/run sh -c "$$CMD"

.PHONY: test-um
test-um: root setup test-deps build failpoints bin/demo ## The suites on that machine, whole; a part of it is in make test (root)
	LIMIT=4h hack/um/test hack/um/all.txt

.PHONY: test-um-release
test-um-release: root setup test-deps build failpoints bin/demo kubelet bin/critest/.built ## critest, a kubelet and the crash matrix on that machine, for a release: hours (root)
	LIMIT=6h hack/um/test hack/um/release.txt

.PHONY: test-um-selinux
test-um-selinux: root setup test-deps build failpoints bin/demo ## The tests of SELinux where it is enforced (root)
	hack/um/test -s hack/um/selinux.txt

.PHONY: setup
setup: packages bin/cni/.built ## Debian packages that are missing, and the CNI plugins

# Programs that run beside minicri: runc for the tests, containerd for
# the benchmarks that compare.
.PHONY: test-deps bench-deps
test-deps: packages
	@hack/unpack runc docker-registry
bench-deps: packages
	@hack/unpack containerd runc docker-registry

# What benchmarks in the guest compare with: containerd and runc as their own projects
# release them.
bin/containerd/.built: hack/containerd/go.mod hack/containerd/go.sum
	CGO_ENABLED=1 go build -C hack/containerd -tags seccomp,no_btrfs -ldflags '-s -w' -o $(CURDIR)/bin/containerd/ tool
	@touch $@

.PHONY: packages
packages:
	@hack/setup

# go.mod and go.sum say all there is to know about the plugins.
bin/cni/.built: hack/plugins/go.mod hack/plugins/go.sum
	CGO_ENABLED=0 go build -C hack/plugins -ldflags "-s -w" -o $(CURDIR)/bin/cni/ tool
	@touch $@

# Plugins that tests run and that are not installed.
bin/networks/.built: hack/networks/go.mod hack/networks/go.sum
	CGO_ENABLED=0 go build -C hack/networks -ldflags "-s -w" -o $(CURDIR)/bin/networks/ tool
	@touch $@

# A real kubelet for test/kubelet; KUBERNETES=1.36.3 for another version, which the tests run if it is set.
.PHONY: kubelet
kubelet: bin/kubelet/$(KUBERNETES)/kubelet

bin/kubelet/$(KUBERNETES)/kubelet: hack/kubelet hack/cluster/kubernetes/go.mod hack/cluster/kubernetes/go.sum
	hack/kubelet $(KUBERNETES)

.PHONY: build
build: bin/cni/.built ## All that make install installs, below bin/
	sh oci/pause/build.sh
	sh supervisor/launch/build.sh
	CGO_ENABLED=0 $(gobuild) -o bin/minicri ./cmd/minicri
	CGO_ENABLED=1 $(shimbuild) -o bin/minicri-shim ./cmd/minicri-shim
	GOARCH= CC= CGO_ENABLED=0 go run ./hack/manual share bin/share

# The demo, a program of its own: it is no part of what is installed.
.PHONY: bin/demo
bin/demo:
	CGO_ENABLED=0 $(gobuild) -o bin/demo ./hack/demo

# For tests that make the daemon fail or die at a named point.
.PHONY: failpoints
failpoints: bin/cni/.built
	sh oci/pause/build.sh
	sh supervisor/launch/build.sh
	GOFLAGS='$(shell hack/goflags failpoints)' CGO_ENABLED=0 $(gobuild) -o bin/failpoints/ ./cmd/minicri ./test/crash/trip
	GOFLAGS='$(shell hack/goflags failpoints)' CGO_ENABLED=1 $(shimbuild) -o bin/failpoints/minicri-shim ./cmd/minicri-shim
	@ln -sfn ../cni bin/failpoints/cni

# Compiled first, outside: the namespace has no network to fetch a module.
# RUNTIME is for bench-container: runc or crun below both.
bench-%: root bench-deps setup build ## Measure and print: sandbox, container or scale (root)
	go build -o bin/bench/$* ./test/bench/$*
	PATH="$(CURDIR)/bin/debian/usr/bin:$(CURDIR)/bin/debian/usr/sbin:$$PATH" hack/in-netns $(if $(filter crun,$(RUNTIME)),hack/without-unified) bin/bench/$* $(if $(RUNTIME),-runtime $(RUNTIME))

# In a guest system calls are slow: what counts is the ratio of two numbers of one boot.
.PHONY: bench-um
bench-um: root setup build bin/containerd/.built ## bench-sandbox, bench-container and bench-scale on cgroup v2 with systemd and AppArmor; MARKS=10,110 are numbers of pods (root)
	for what in sandbox container scale; do go build -o bin/bench/$$what ./test/bench/$$what || exit; done
	LIMIT=4h hack/um/run -m 12G hack/um/guest/bench $(MARKS)

# What it builds, some minutes of Kubernetes the first time, it keeps outside the tree.
.PHONY: bin/cluster
bin/cluster:
	CGO_ENABLED=0 go build -o bin/cluster ./hack/cluster

CLUSTER ?= minicri
NODES   ?= 2

.PHONY: cluster-up cluster-down
cluster-up: root setup build bin/cluster ## A Kubernetes cluster of this machine alone: CLUSTER=NAME NODES=N (root)
	bin/cluster --name $(CLUSTER) up --nodes $(NODES)

cluster-down: root bin/cluster ## Remove it, and look for what it left: CLUSTER=NAME (root)
	bin/cluster --name $(CLUSTER) down

# A cluster of its own, removed in any case. The tests are named cases; TESTFLAGS
# such as '-test.run TestNodeReboot' for some of them.
.PHONY: test-cluster
test-cluster: root setup build bin/cluster ## What users ask of a cluster, on two nodes (root)
	go test -c -o bin/test/cluster ./test/cluster
	test/cluster/run $(TESTFLAGS)

# FOCUS and SKIP are regular expressions of names of specs; the results are compared
# with test/kubernetes/specs.txt, UPDATE=1 writes them there.
.PHONY: e2e
e2e: root setup build bin/cluster ## Kubernetes' own tests on two nodes; FOCUS='Probing container' for some (root)
	@hack/setup hack/cluster/packages.txt
	CGO_ENABLED=0 go build -o bin/kubernetes ./test/kubernetes
	test/kubernetes/run

# Conformance too, and what has to run alone.
.PHONY: e2e-full
e2e-full: ## The same with every [NodeConformance] and [Conformance] spec, an hour and more (root)
	FOCUS='\[NodeConformance\]|\[Conformance\]' SKIP='\[Flaky\]' $(MAKE) e2e

# One node without a cluster: the suite brings what it needs of one.
.PHONY: e2e-node
e2e-node: root setup build bin/cluster ## Kubernetes' e2e_node on a node; FOCUS='InitContainer' for some (root)
	@hack/setup hack/cluster/packages.txt
	CGO_ENABLED=0 go build -o bin/kubernetes ./test/kubernetes
	test/kubernetes/run-node

bin/tools/.built: hack/tools/go.mod hack/tools/go.sum $(wildcard hack/tools/*/*.go)
	go build -C hack/tools -o $(CURDIR)/bin/tools/ tool
	@touch $@

# The tools that lint and the test of generated code need.
bin/tools/.lint: hack/tools/go.mod hack/tools/go.sum $(wildcard hack/tools/*/*.go)
	go build -C hack/tools -o $(CURDIR)/bin/tools/ mvdan.cc/gofumpt honnef.co/go/tools/cmd/staticcheck ./protogen \
		google.golang.org/protobuf/cmd/protoc-gen-go github.com/containerd/ttrpc/cmd/protoc-gen-go-ttrpc
	@touch $@

.PHONY: lint
lint: packages bin/tools/.lint ## gofumpt, go vet, staticcheck, shellcheck, prose
	go vet ./...
	hack/lint

bin/tools/.release: hack/release/go.mod hack/release/go.sum hack/release/main.go
	go build -C hack/release -o $(CURDIR)/bin/tools/ tool
	go build -C hack/release -o $(CURDIR)/bin/tools/sbom .
	@touch $@

.PHONY: release
release: packages bin/tools/.release ## Tarballs, .deb and .rpm for amd64 and arm64, in bin/release/files
	@hack/setup hack/release/packages.txt
	@hack/release/sysroot libseccomp-dev
	hack/release/make

# The second build has a cache of its own: what the first has compiled is compiled again.
.PHONY: test-release
test-release: root setup build release ## Install, upgrade and remove the packages; build again and compare (root)
	hack/release/test $(TESTFLAGS)
	GOCACHE=$(CURDIR)/bin/release/cache TMPDIR=$(CURDIR)/bin/release TZ=Asia/Tokyo LANG=de_DE.UTF-8 hack/release/make bin/release/again
	cmp bin/release/files/SHA256SUMS bin/release/again/SHA256SUMS

# What kind and its node image need beside Kubernetes.
bin/kind/.built: hack/kind/go.sum hack/kind/local-path/go.sum hack/kind/flannel/go.sum hack/kind/flannel/build hack/critest/go.sum
	CGO_ENABLED=0 go build -C hack/kind -ldflags '-s -w' -o $(CURDIR)/bin/kind/ tool
	CGO_ENABLED=0 go build -C hack/kind/local-path -ldflags '-s -w' -o $(CURDIR)/bin/kind/ tool
	CGO_ENABLED=0 go build -C hack/critest -ldflags '-s -w' -o $(CURDIR)/bin/kind/ sigs.k8s.io/cri-tools/cmd/crictl
	hack/kind/flannel/build $(CURDIR)/bin/kind/flanneld
	@touch $@

# Kubernetes' programs and images are built the first time, some minutes.
.PHONY: kind-image
kind-image: root setup build bin/cluster bin/kind/.built ## A node image for kind: bin/kind/node.tar; docs/kind.md (root)
	bin/cluster offer $(CURDIR)/bin/kind/offered
	hack/kind/image

# Docker runs in a network namespace of its own.
.PHONY: test-kind
test-kind: root ## The real kind with the real Docker, by docs/kind.md (root)
	hack/test kind

# docs/quickstart.md, word for word, on a Debian 12 with systemd.
.PHONY: test-node
test-node: root release bin/cluster ## From the release's files to a Ready node of kubeadm, by docs/quickstart.md (root)
	bin/cluster offer $(CURDIR)/bin/release/node
	hack/release/node

# Some minutes, more on a busy machine: each instruction of the guest is translated.
.PHONY: test-arm64
test-arm64: root release ## A pod with the release for arm64, on Debian's kernel in an emulator (root)
	@hack/setup hack/release/arm64.txt
	hack/release/arm64

# A release is made after this: RELEASE=1 make vulncheck.
.PHONY: vulncheck
vulncheck: bin/tools/.built ## Known vulnerabilities in what is linked; RELEASE=1 fails where their list cannot be had
	hack/vulncheck

.PHONY: size
size: ## Count the lines of the product, and of its tests
	@hack/size

.PHONY: fmt
fmt: bin/tools/.lint ## Format the Go files
	bin/tools/gofumpt -w .

# What is checked in and made by a program. The tests of the top directory fail
# when it is not current; supervisor/api has its own test.
.PHONY: generate
generate: packages bin/tools/.built ## Make what is checked in and made by a program: NOTICE, supervisor/api, pages of docs/
	go run ./hack/manual configuration > docs/configuration.md
	go run ./hack/manual metrics > docs/metrics.md
	go run ./hack/cri > docs/cri.md
	go run ./hack/cri tests > docs/contributors/cri.md
	go test -run TestSecurityPageIsCurrent . -update
	go build -C hack/notice -o $(CURDIR)/bin/tools/notice .
	bin/tools/notice > bin/tools/NOTICE && cp bin/tools/NOTICE NOTICE
	PATH="$(CURDIR)/bin/tools:$$PATH" protogen supervisor/api/shim.proto supervisor/api protoc-gen-go protoc-gen-go-ttrpc

# What hack/manual writes below share/.
pages = man/man8/minicri.8 man/man5/minicri.toml.5 bash-completion/completions/minicri \
	zsh/site-functions/_minicri fish/vendor_completions.d/minicri.fish

# It copies what make build has built, to where its user may write. What the owner of a
# node may have changed is never overwritten.
.PHONY: install
install: ## Copy what make build has built: binaries, plugins, unit, manual; PREFIX and DESTDIR say where
	@ls bin/minicri bin/minicri-shim bin/cni/bridge bin/share/config.toml >/dev/null || { echo "install: run 'make build' first" >&2; exit 1; }
	install -D -m 0755 -t $(bindir) bin/minicri bin/minicri-shim
	install -D -m 0755 -t $(libdir)/minicri/cni bin/cni/*
	install -d $(libdir)/systemd/system
	sed 's|@BINDIR@|$(PREFIX)/bin|' hack/minicri.service > $(libdir)/systemd/system/minicri.service
	install -D -m 0644 hack/sysctl.conf $(libdir)/sysctl.d/60-minicri.conf
	for page in $(pages); do install -D -m 0644 bin/share/$$page $(sharedir)/$$page || exit; done
	install -D -m 0644 -t $(sharedir)/doc/minicri LICENSE NOTICE *.md hack/grafana.json hack/alerts.yml bin/share/config.toml
	install -D -m 0644 -t $(sharedir)/minicri hack/crictl.yaml
	install -D -m 0644 -t $(sharedir)/doc/minicri/docs docs/*.*
	install -D -m 0644 -t $(sharedir)/doc/minicri/docs/contributors docs/contributors/*
	install -D -m 0644 -t $(sharedir)/doc/minicri/test/results test/results/*
	[ -e $(confdir)/minicri/config.toml ] || install -D -m 0644 bin/share/config.toml $(confdir)/minicri/config.toml
	[ -e $(confdir)/crictl.yaml ] || install -D -m 0644 hack/crictl.yaml $(confdir)/crictl.yaml
	@echo 'Start it with: systemctl daemon-reload && systemctl enable --now minicri'

# A configuration of comments alone, and crictl's as it came, are what install brought.
.PHONY: uninstall
uninstall: ## Remove what install brought, and say what is left
	rm -f $(bindir)/minicri $(bindir)/minicri-shim $(libdir)/systemd/system/minicri.service $(libdir)/sysctl.d/60-minicri.conf $(addprefix $(sharedir)/,$(pages))
	rm -rf $(sharedir)/doc/minicri $(sharedir)/minicri $(libdir)/minicri
	@grep -qsv '^#\|^$$' $(confdir)/minicri/config.toml || rm -f $(confdir)/minicri/config.toml
	@! cmp -s hack/crictl.yaml $(confdir)/crictl.yaml || rm $(confdir)/crictl.yaml
	@rmdir $(confdir)/minicri 2>/dev/null || true
	@for path in $(confdir)/minicri $(confdir)/crictl.yaml $(DESTDIR)/var/lib/minicri $(DESTDIR)/run/minicri; do \
		[ ! -e $$path ] || echo "uninstall: left where it is: $$path"; done

.PHONY: clean
clean: ## Remove what was built
	rm -rf bin oci/pause/pause.elf supervisor/launch/launch.elf
