package container

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/minicri/minicri/oci"
)

// cdiFiles are the files in which vendors describe their devices. They are
// parsed when a container asks for a device, and again only when they have
// changed: a few KiB of YAML take as long as the rest of a creation.
type cdiFiles struct {
	// directories are where the files are, nil for the CDI's own.
	directories []string
	// mu guards what follows and is held while files are parsed.
	mu    sync.Mutex
	seen  []cdiFile
	cache *cdi.Cache
}

// cdiFile identifies a version of a file. The change time cannot be set back.
type cdiFile struct {
	path    string
	inode   uint64
	size    int64
	changed time.Time
}

// unsettled is how long after a change a file may change again and keep its time:
// the kernel's clock for times of files is coarse.
const unsettled = 100 * time.Millisecond

// devices are those that vendors describe now; nil for a container that asks
// for none.
func (f *cdiFiles) devices(config *runtimeapi.ContainerConfig) (oci.CDI, error) {
	if wants, err := wantsCDI(config); err != nil || !wants {
		return nil, err
	}
	cache, err := f.parsed()
	if err != nil {
		return nil, err
	}
	return cdiDevices{cache}, nil
}

func (f *cdiFiles) parsed() (*cdi.Cache, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	directories := f.directories
	if len(directories) == 0 {
		directories = cdi.DefaultSpecDirs
	}
	found, err := findCDIFiles(directories)
	if err != nil {
		return nil, fmt.Errorf("look for CDI files: %w", err)
	}
	settled := !slices.ContainsFunc(found, func(file cdiFile) bool { return now.Sub(file.changed) < unsettled })
	if f.cache != nil && slices.Equal(found, f.seen) {
		return f.cache, nil
	}
	cache, err := cdi.NewCache(cdi.WithAutoRefresh(false), cdi.WithSpecDirs(directories...))
	if err != nil {
		return nil, err
	}
	f.seen, f.cache = found, nil
	if settled {
		f.cache = cache
	}
	return cache, nil
}

// cdiDevices are the devices of one parse, for any number of containers.
type cdiDevices struct{ *cdi.Cache }

// InjectDevices changes a spec as cdi.Cache does, which writes what it finds out
// about device nodes, as their numbers, into the cache: here into a copy.
func (d cdiDevices) InjectDevices(spec *specs.Spec, names ...string) (unknown []string, err error) {
	edits := &cdi.ContainerEdits{}
	seen := make(map[*cdi.Spec]bool)
	for i, name := range names {
		if slices.Contains(names[:i], name) {
			continue // its hooks must not run twice
		}
		device := d.GetDevice(name)
		if device == nil {
			unknown = append(unknown, name)
			continue
		}
		if of := device.GetSpec(); !seen[of] {
			seen[of] = true
			edits.Append(copyEdits(of.ContainerEdits))
		}
		edits.Append(copyEdits(device.ContainerEdits))
	}
	if len(unknown) > 0 {
		return unknown, fmt.Errorf("no CDI file describes %q", unknown)
	}
	return nil, edits.Apply(spec)
}

func copyEdits(edits cdispecs.ContainerEdits) *cdi.ContainerEdits {
	nodes := make([]*cdispecs.DeviceNode, 0, len(edits.DeviceNodes))
	for _, node := range edits.DeviceNodes {
		nodes = append(nodes, new(*node))
	}
	edits.DeviceNodes = nodes
	return &cdi.ContainerEdits{ContainerEdits: &edits}
}

func wantsCDI(config *runtimeapi.ContainerConfig) (bool, error) {
	_, annotated, err := cdi.ParseAnnotations(config.GetAnnotations())
	if err != nil {
		return false, fmt.Errorf("CDI annotations: %w", err)
	}
	return len(annotated) > 0 || len(config.GetCDIDevices()) > 0, nil
}

// findCDIFiles lists what is in the directories, those that are absent aside.
func findCDIFiles(directories []string) (files []cdiFile, err error) {
	for _, directory := range directories {
		paths, err := filepath.Glob(filepath.Join(directory, "*"))
		if err != nil {
			return nil, err
		}
		for _, path := range paths {
			file, err := lookAtCDIFile(path)
			if err != nil {
				return nil, err
			}
			files = append(files, file)
		}
	}
	return files, nil
}

// lookAtCDIFile: a link that leads nowhere, or a file that went meanwhile, has
// its name only.
func lookAtCDIFile(path string) (cdiFile, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return cdiFile{path: path}, nil
	}
	if err != nil {
		return cdiFile{}, err
	}
	stat, known := info.Sys().(*syscall.Stat_t)
	if !known {
		return cdiFile{}, fmt.Errorf("stat %s: %w", path, fs.ErrInvalid)
	}
	return cdiFile{path: path, inode: stat.Ino, size: stat.Size, changed: time.Unix(stat.Ctim.Unix())}, nil
}
