package network

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/state"
)

// Configuration is a network configuration list as it was read. It is immutable.
type Configuration struct {
	Name string
	// File is its source, "" for the embedded default network.
	File string
	// Bytes is the whole list as one JSON document, with plugins that the file took from a folder.
	Bytes   []byte
	Plugins []string
}

// readDirectory reads the valid configurations of a directory, sorted by file name (CNI conventions). It
// reports the others as problems, and uses a file's last valid content: the file may be half written now.
func readDirectory(directory string, last []*Configuration) (good []*Configuration, problems []error) {
	files, err := libcni.ConfFiles(directory, []string{".conf", ".conflist", ".json"})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return last, []error{fmt.Errorf("list the CNI configuration directory: %w", err)}
	}
	slices.Sort(files)
	for _, file := range files {
		configuration, err := readFile(file)
		if err == nil {
			good = append(good, configuration)
			continue
		}
		err = fmt.Errorf("CNI configuration %s: %w", file, err)
		if known := slices.IndexFunc(last, func(c *Configuration) bool { return c.File == file }); known >= 0 {
			good = append(good, last[known])
			err = fmt.Errorf("%w; its last valid content stays in use", err)
		}
		problems = append(problems, err)
	}
	return good, problems
}

// Survey returns what the daemon would use, and errors for skipped files and missing plugins.
func Survey(directory string, binDirs []string) (*Configuration, []error) {
	good, problems := readDirectory(directory, nil)
	if len(good) == 0 {
		return nil, problems
	}
	return good[0], slices.Concat(problems, missing(good[0], binDirs, true))
}

// missing returns an error for each plugin of a network that has no program. A thorough look also starts the programs,
// and looks for those of IPAM plugins.
func missing(c *Configuration, directories []string, thorough bool) (problems []error) {
	find := func(name, what string) {
		path, err := invoke.FindInPath(name, directories)
		if info, _ := os.Stat(path); err == nil && (info == nil || info.Size() == 0 || unix.Access(path, unix.X_OK) != nil) {
			err = fmt.Errorf("plugin %s cannot be executed, or is empty", path)
		}
		if program := exec.Command(path); err == nil && thorough {
			program.Env, program.SysProcAttr = []string{"CNI_COMMAND=VERSION"}, &syscall.SysProcAttr{Setsid: true}
			if err = program.Start(); err == nil { // what is for another machine does not start
				_, _ = program.Process.Kill(), program.Wait()
			}
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("network %q: %s%w: install the plugin or set cni_bin_dir", c.Name, what, err))
		}
	}
	for _, plugin := range chainOf(c.Bytes) {
		find(plugin.Type, "")
		if thorough && plugin.IPAM.Type != "" {
			find(plugin.IPAM.Type, "ipam: ")
		}
	}
	return problems
}

// plugin is the part of a plugin's configuration that we read.
type plugin struct {
	Type string
	IPAM struct{ Type string }
}

// chainOf returns the plugins of a configuration list, none if it cannot be decoded: go-cni reports that.
func chainOf(config []byte) []plugin {
	var list struct{ Plugins []plugin }
	_ = json.Unmarshal(config, &list)
	return list.Plugins
}

// readFile reads one file. For malformed JSON, the error names the line.
func readFile(file string) (*Configuration, error) {
	data, err := state.ReadFile(file)
	if err != nil {
		return nil, err
	}
	list, err := parseList(file, data)
	if err == nil {
		return newConfiguration(list, file)
	}
	if syntax, ok := errors.AsType[*json.SyntaxError](json.Unmarshal(data, &json.RawMessage{})); ok {
		return nil, fmt.Errorf("line %d: %w", 1+bytes.Count(data[:min(int(syntax.Offset), len(data))], []byte{'\n'}), err)
	}
	return nil, err
}

func parseList(file string, data []byte) (*libcni.NetworkConfigList, error) {
	if filepath.Ext(file) != ".conflist" {
		plugin, err := libcni.NetworkPluginConfFromBytes(data)
		if err != nil {
			return nil, err
		}
		return libcni.ConfListFromConf(plugin)
	}
	list, err := libcni.NetworkConfFromBytes(data)
	if err == nil && !list.LoadOnlyInlinedPlugins {
		err = onlyFiles(filepath.Join(filepath.Dir(file), list.Name))
	}
	if err != nil {
		return nil, err
	}
	return libcni.NetworkConfFromFile(file)
}

// onlyFiles refuses a folder of plugins with a fifo in it: libcni would wait for its writer for ever.
func onlyFiles(folder string) error {
	files, err := libcni.ConfFiles(folder, []string{".conf"})
	for _, file := range files {
		info, statErr := os.Stat(file)
		switch {
		case statErr != nil:
			err = errors.Join(err, statErr)
		case !info.Mode().IsRegular():
			err = errors.Join(err, fmt.Errorf("%s is no regular file, its mode is %v", file, info.Mode()))
		}
	}
	return err
}

// newConfiguration writes the list as one document: the journal must not depend on the files next to the list
// that plugins may come from (CNI SPEC, loadOnlyInlinedPlugins).
func newConfiguration(list *libcni.NetworkConfigList, file string) (*Configuration, error) {
	if len(list.Plugins) == 0 {
		return nil, errors.New("the list has no plugins")
	}
	if err := utils.ValidateNetworkName(list.Name); err != nil { // before CNI 1.1 no STATUS says so
		return nil, err
	}
	if most := 255 - len("--"+eth0) - 64; len(list.Name) > most { // libcni's cache has files NAME-ID-eth0
		return nil, fmt.Errorf("name: has %d characters, more than %d: no result of an ADD could be kept under it", len(list.Name), most)
	}
	if _, _, _, err := version.ParseVersion(list.CNIVersion); err != nil {
		return nil, fmt.Errorf("cniVersion: %w", err)
	}
	raw := make(map[string]json.RawMessage)
	if err := json.Unmarshal(list.Bytes, &raw); err != nil {
		return nil, err
	}
	c := &Configuration{Name: list.Name, File: file}
	var inlined []json.RawMessage
	for _, plugin := range list.Plugins {
		inlined = append(inlined, plugin.Bytes)
		c.Plugins = append(c.Plugins, plugin.Network.Type)
	}
	plugins, err := json.Marshal(inlined)
	if err != nil {
		return nil, err
	}
	raw["plugins"], raw["loadOnlyInlinedPlugins"] = plugins, json.RawMessage("true")
	c.Bytes, err = json.Marshal(raw)
	return c, err
}
