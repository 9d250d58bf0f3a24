// flannel, the network of the node image of hack/kind. hack/kind/image builds it without its backend for
// Tencent's cloud, whose module the Go module proxy does not have.
module github.com/minicri/minicri/hack/kind/flannel

go 1.26.6

require github.com/flannel-io/flannel v0.28.10
