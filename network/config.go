package network

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"

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
	// CNIVersion is the version that the plugins get, "" if the file has none.
	CNIVersion string
	// Stale says why the present content of File cannot be used, nil for none that is in use.
	Stale error
}

func (c *Configuration) version() string { return cmp.Or(c.CNIVersion, "0.1.0") }

// source names the file for a person.
func (c *Configuration) source() string { return cmp.Or(c.File, "default_network") }

// endings are those of the files that may have a network.
var endings = []string{".conf", ".conflist", ".json"}

// readDirectory reads the valid configurations of a directory, sorted by file name (CNI conventions). It
// reports the others as problems, and uses a file's last valid content: the file may be half written now.
func readDirectory(directory string, last []*Configuration) (good []*Configuration, problems []error) {
	files, err := libcni.ConfFiles(directory, endings)
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
			err = fmt.Errorf("%w; its previous content stays in use", err)
			stale := *last[known]
			stale.Stale = err
			good = append(good, &stale)
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
	return good[0], slices.Concat(problems, new(programs).unfit(good[0], binDirs, true))
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
	data = withoutMark(data)
	list, err := parseList(file, data)
	if err == nil {
		return newConfiguration(list, file)
	}
	return nil, atLine(data, err, filepath.Ext(file) == ".conflist")
}

// withoutMark removes the byte order mark that editors of other systems write.
func withoutMark(data []byte) []byte { return bytes.TrimPrefix(data, []byte("\uFEFF")) }

// atLine adds the line to an error about JSON. libcni loses it where it decodes a list a second time.
func atLine(data []byte, err error, list bool) error {
	var again error
	if list {
		again = json.Unmarshal(data, &struct {
			Name, CNIVersion string
			Plugins          []types.PluginConf
		}{})
	} else {
		again = json.Unmarshal(data, &types.PluginConf{})
	}
	offset := -1
	if syntax, ok := errors.AsType[*json.SyntaxError](again); ok {
		offset = int(syntax.Offset)
	} else if wrong, ok := errors.AsType[*json.UnmarshalTypeError](again); ok {
		offset = int(wrong.Offset)
	}
	if offset < 0 {
		return err
	}
	return fmt.Errorf("line %d: %w", 1+bytes.Count(data[:min(offset, len(data))], []byte{'\n'}), err)
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
	if err != nil || list.LoadOnlyInlinedPlugins {
		return list, err
	}
	folder := filepath.Join(filepath.Dir(file), list.Name)
	files, err := libcni.ConfFiles(folder, []string{".conf"})
	for _, file := range files {
		data, readErr := state.ReadFile(file) // unlike libcni, it does not wait for the writer of a fifo
		if readErr != nil {
			err = errors.Join(err, readErr)
			continue
		}
		data = withoutMark(data)
		plugin, parseErr := libcni.NetworkPluginConfFromBytes(data)
		if parseErr != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", file, atLine(data, parseErr, false)))
			continue
		}
		list.Plugins = append(list.Plugins, plugin)
	}
	return list, err
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
	c := &Configuration{Name: list.Name, File: file, CNIVersion: list.CNIVersion}
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
