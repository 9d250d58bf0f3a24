package network

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// Installers change a configuration in many ways, some of which leave its size and times as they were. The pod that is
// made next gets the new content in all of them.
func TestNextPodSeesEveryChange(t *testing.T) {
	// The scripts run in the directory. put writes the text into a file, always with one modification time.
	for _, way := range []struct{ name, first, change string }{
		{"written in place", "put 10.conflist", "put 10.conflist"},
		{"renamed over", "put 10.conflist", "put new; mv new 10.conflist"},
		{"link to another file", "put one; ln -s one 10.conflist", "put two; ln -s two link; mv -T link 10.conflist"},
		{
			"link to another folder, as a ConfigMap's volume",
			"mkdir ..1; put ..1/10.conflist; ln -s ..1 ..data; ln -s ..data/10.conflist .",
			"mkdir ..2; put ..2/10.conflist; ln -s ..2 ..link; mv -T ..link ..data",
		},
		{
			"plugin in a folder of the list",
			`mkdir net; echo '{"cniVersion": "1.1.0", "name": "net"}' >10.conflist; text=$plugin put net/10.conf`,
			"text=$plugin put net/10.conf",
		},
	} {
		t.Run(way.name, func(t *testing.T) {
			n := newNode(t, nil)
			plugin := n.script()
			plugin["mark"] = "1500"
			text := conflist(t, "net", plugin)
			do := func(script, text string) {
				_, plugins, _ := strings.Cut(text, `"plugins":[`)
				command := exec.Command("sh", "-ec", `put() { printf %s "$text" >$1; touch -d @1 $1; }; `+script)
				command.Dir, command.Env = n.ConfDir, append(os.Environ(), "text="+text, "plugin="+strings.TrimSuffix(plugins, "]}"))
				output, err := command.CombinedOutput()
				harness.Need(t, err == nil, "%s: %v, %s", script, err, output)
			}
			do(way.first, text)
			attached := func(id, mark string) {
				must(t, n.Options.Namespaces.(interface{ Create(string) error }).Create(id))
				result, err := n.Attach(t.Context(), Attachment{ID: id}, n.Options.Namespaces.Path(id))
				must(t, err)
				has := strings.Contains(string(result.Config), `"mark":"`+mark+`"`)
				harness.Want(t, has, "pod %s got %s, want %s", id, result.Config, mark)
				n.detach(t, id)
			}
			attached("a", "1500")
			do(way.change, strings.ReplaceAll(text, "1500", "1400"))
			attached("b", "1400")
		})
	}
}

// A directory is followed until no handler has it.
func TestDirectoriesAreFollowedWhileInUse(t *testing.T) {
	n := newScripted(t, nil)
	kept, gone := n.In(t.TempDir()), n.In(t.TempDir())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		gone.followStatus()
	}()
	n.Keep([]string{kept.path})
	<-ended
	harness.Want(t, slices.Equal(n.directories(), []*Directory{kept, n.Directory}), "followed: %v", n.directories())
}

// A file that is broken while its network is in use: errors about the network name the file, the line, and that its
// previous content stays in use.
func TestBrokenFileIsInEveryError(t *testing.T) {
	n := newScripted(t, nil)
	n.Reload()
	n.tell(t, "ADD.fail")
	n.tell(t, "STATUS.fail")
	file := filepath.Join(n.ConfDir, "10.conflist")
	put(t, file, "{\n\"cniVersion\": \"1.1.0\",\n\"name\": \"net\"\n\"plugins\": []}")
	wants := []string{"told to fail", file, "line 4: ", "previous content stays in use"}
	must(t, n.Options.Namespaces.(interface{ Create(string) error }).Create("web"))
	_, err := n.Attach(t.Context(), Attachment{ID: "web"}, n.Options.Namespaces.Path("web"))
	harness.WantError(t, err, wants...)
	n.refreshStatus()
	harness.WantError(t, n.ready(t), wants...)
	n.untell(t, "STATUS.fail")
	n.refreshStatus()
	harness.Check(t, n.ready(t))
	for _, want := range wants[1:] {
		harness.Want(t, strings.Contains(n.Remark(), want), "the remark %q has no %q", n.Remark(), want)
	}
	_, after, _ := strings.Cut(n.log.String(), "network configuration skipped")
	loaded := strings.Contains(after, "network configuration loaded")
	harness.Want(t, !loaded, "the log says that the broken file was loaded: %s", after)
	n.detach(t, "web")
}

// Errors name the line also where the JSON is well formed; a byte order mark and the line ends of other systems are no
// errors.
func TestFormsOfFiles(t *testing.T) {
	for _, c := range []struct{ name, file, text, want string }{
		{"mark", "10.conflist", "\uFEFF" + goodList, ""},
		{"mark, one plugin", "10.conf", "\uFEFF" + `{"cniVersion": "1.0.0", "name": "good", "type": "bridge"}`, ""},
		{"line ends", "10.json", "{\r\n\"cniVersion\": \"1.0.0\",\r\n\"name\": \"good\",\r\n\"type\": \"bridge\"}\r\n", ""},
		{
			"newest version", "10.conflist",
			strings.Replace(goodList, `"cniVersion": "1.1.0"`, `"cniVersions": ["1.0.0", "1.1.0"], "x": {}`, 1), "",
		},
		{
			"plugins are no list", "10.conflist",
			"{\"name\": \"x\",\n\"cniVersion\": \"1.0.0\",\n\"plugins\": \"bridge\"}", "line 3: ",
		},
		{
			"ipam is no object", "10.conflist",
			"{\"name\": \"x\",\n\"plugins\": [\n{\"type\": \"bridge\",\n\"ipam\": \"host-local\"}]}", "line 4: ",
		},
		{"name is a number", "10.conf", "{\"type\": \"bridge\",\n\"name\": 1}", "line 2: "},
		{"half", "10.conf", "{\"type\": \"bridge\",\n\"name\":", "line 2: "},
	} {
		t.Run(c.name, func(t *testing.T) {
			directory := t.TempDir()
			put(t, filepath.Join(directory, c.file), c.text)
			got, problems := readFirst(directory)
			if c.want == "" {
				harness.Need(t, got != nil, "got %+v, %v", got, problems)
				harness.Want(t, got.Name == "good", "got %+v, %v", got, problems)
				harness.Want(t, len(problems) == 0, "got %+v, %v", got, problems)
				return
			}
			harness.Need(t, got == nil && len(problems) == 1, "got %+v, %v", got, problems)
			harness.WantError(t, problems[0], c.want, filepath.Join(directory, c.file))
		})
	}
}

// A cniVersion that a plugin does not support is the error, before any plugin runs: by STATUS they would only say that
// they do not know STATUS.
func TestUnsupportedVersion(t *testing.T) {
	for _, c := range []struct{ name, version, plugin, ipam, want string }{
		{"newer", "9.9.9", "scripted", "", "plugin scripted"},
		{"older", "0.3.1", "scripted", "", "plugin scripted"},
		{"ipam", "1.1.0", "bridge", "scripted-1.0.0", "ipam: plugin scripted-1.0.0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			old := t.TempDir()
			script := strings.ReplaceAll(string(harness.Read(t, filepath.Join(testPlugins, "scripted"))), `, "1.1.0"]`, "]")
			must(t, os.WriteFile(filepath.Join(old, "scripted-1.0.0"), []byte(script), 0o755))
			n := newNode(t, func(o *Options) { o.BinDirs = append(o.BinDirs, old) })
			plugin := n.script()
			plugin["type"] = c.plugin
			if c.ipam != "" {
				plugin["ipam"] = map[string]any{"type": c.ipam}
			}
			file := filepath.Join(n.ConfDir, "10.conflist")
			put(t, file, marshal(t, map[string]any{"cniVersion": c.version, "name": "net", "plugins": []any{plugin}}))
			n.Reload()
			wants := []string{"cniVersion " + c.version + " is not supported by " + c.want, "1.0.0", file}
			_, err := n.Attach(t.Context(), Attachment{ID: "web"}, "")
			harness.WantError(t, err, wants...)
			n.refreshStatus()
			harness.WantError(t, n.ready(t), wants...)
			_, err = os.Stat(filepath.Join(n.scripted, "log"))
			harness.Want(t, os.IsNotExist(err) && len(n.ids()) == 0, "plugins ran, or there is an attachment")
			_, problems := Survey(n.ConfDir, n.BinDirs)
			harness.Need(t, len(problems) == 1, "problems: %v", problems)
			harness.WantError(t, problems[0], wants...)
		})
	}
}

// Programs that cannot run make the network not ready. While one is replaced in place, a network that was ready stays
// so for a time: the node's pods would leave all services.
func TestProgramsThatCannotRun(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(path string) error
		want  string
	}{
		{"missing", os.Remove, "failed to find plugin"},
		{"empty", func(path string) error { return os.Truncate(path, 0) }, "is empty"},
		{"not executable", func(path string) error { return os.Chmod(path, 0o644) }, "chmod +x"},
		{
			"another architecture", func(path string) error { return os.WriteFile(path, foreignELF(), 0o755) },
			"another architecture",
		},
		{"damaged", func(path string) error { return os.WriteFile(path, []byte("\x00\x01\x02"), 0o755) }, "damaged"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			output, err := exec.Command("cp", filepath.Join(testPlugins, "scripted"), dir).CombinedOutput()
			harness.Need(t, err == nil, "%s", output)
			n := newScripted(t, func(o *Options) { o.BinDirs = []string{dir} })
			n.Reload()
			n.refreshStatus()
			harness.Check(t, n.ready(t))
			must(t, c.spoil(filepath.Join(dir, "scripted")))
			n.refreshStatus()
			harness.Check(t, n.ready(t))
			last := n.status.Load()
			n.status.Store(&status{slow: true, unfit: last.unfit.Add(-installLimit)})
			n.refreshStatus()
			harness.WantError(t, n.ready(t), c.want, "install the plugin")
		})
	}
}

// foreignELF is the head of a program for a machine that this one is not (elf(5)).
func foreignELF() []byte {
	head := make([]byte, 64)
	copy(head, "\x7fELF\x02\x01\x01")
	head[16], head[18], head[20] = 2, 0x15, 1 // ET_EXEC, EM_PPC64
	return head
}

// The embedded network works with older plugins, which distributions install where they are found first: newer ones of
// another directory go before them, and else the cniVersion is one that they support.
func TestEmbeddedNetworkBesideOlderPlugins(t *testing.T) {
	older := func(t *testing.T, names ...string) string {
		dir := t.TempDir()
		for _, name := range names {
			script := fmt.Sprintf(`#!/bin/sh
				if [ "$CNI_COMMAND" = VERSION ]; then
					echo '{"cniVersion": "1.0.0", "supportedVersions": ["0.3.1", "0.4.0", "1.0.0"]}'
					exit
				fi
				config=$(cat)
				case $config in
				*'"cniVersion":"1.1.0"'*) echo '{"cniVersion": "1.0.0", "code": 1, "msg": "incompatible CNI versions"}'; exit 1 ;;
				esac
				printf %%s "$config" | exec %s/%s`, absolute(t, realPlugins), name)
			must(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
		}
		return dir
	}
	newer := absolute(t, realPlugins)
	for _, c := range []struct {
		name    string
		dirs    func(t *testing.T) []string
		version string
	}{
		{"all older first", func(t *testing.T) []string { return []string{older(t, embeddedPlugins...), newer} }, "1.1.0"},
		{"one older first", func(t *testing.T) []string { return []string{older(t, "host-local"), newer} }, "1.1.0"},
		{"older last", func(t *testing.T) []string { return []string{newer, older(t, embeddedPlugins...)} }, "1.1.0"},
		{"older alone", func(t *testing.T) []string { return []string{older(t, embeddedPlugins...)} }, "1.0.0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t, func(o *Options) {
				bridged(o)
				o.BinDirs, o.Default.Subnet = c.dirs(t), "10.98.0.0/24"
			})
			removeLinkAtEnd(t, n.Options.Default.Bridge)
			configuration, err := n.Configuration()
			must(t, err)
			harness.Same(t, "the version", configuration.CNIVersion, c.version)
			n.refreshStatus()
			harness.Check(t, n.ready(t))
			harness.Want(t, len(n.attached(t, "web").Addresses) == 1, "no address")
			n.check("web")
			harness.Same(t, "drifted", n.Drifted(), []Drift{})
			n.detach(t, "web")
			_, problems := n.Options.Default.Survey(n.BinDirs)
			harness.Same(t, "problems", fmt.Sprint(problems), "[]")
		})
	}
}
