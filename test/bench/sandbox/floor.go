package main

import (
	"context"
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/libcni"

	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/test/bench/node"
)

// floor is what any runtime has to pay: libcni with the same plugins and the
// same configuration, in a namespace that is there already.
type floor struct {
	cni        *libcni.CNIConfig
	list       *libcni.NetworkConfigList
	namespaces *namespace.Dir
}

func newFloor(n *node.Node) *floor {
	list, err := libcni.NetworkConfFromBytes(n.ConfList())
	if err != nil {
		panic(err) // a constant of this program
	}
	namespaces, err := namespace.Open(n.Config.NetnsDir, "floor-")
	if err != nil {
		panic(err)
	}
	cache := filepath.Join(n.Dir, "floor-cache")
	if err := os.MkdirAll(cache, 0o700); err != nil {
		panic(err)
	}
	return &floor{cni: libcni.NewCNIConfigWithCacheDir(n.Config.BinDirs(), cache, nil), list: list, namespaces: namespaces}
}

func (f *floor) conf(id string) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{
		ContainerID: id, NetNS: f.namespaces.Path(id), IfName: "eth0",
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAME", id}, {"K8S_POD_NAMESPACE", "bench"}},
	}
}

func (f *floor) add(ctx context.Context, id string) error {
	_, err := f.cni.AddNetworkList(ctx, f.list, f.conf(id))
	return err
}

func (f *floor) del(ctx context.Context, id string) error {
	return f.cni.DelNetworkList(ctx, f.list, f.conf(id))
}
