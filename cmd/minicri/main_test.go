package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/test/harness"
)

// Each command has an action, and no action is for a command that does not exist.
func TestEveryCommandHasItsAction(t *testing.T) {
	for _, c := range manual.Commands(manual.Program(nil, nil)) {
		if words := strings.Fields(manual.Line(c)); !slices.Contains([]string{"help", "completion"}, words[0]) {
			found, _, err := program().Find(words)
			harness.Want(t, err == nil && found.RunE != nil, "minicri %s does nothing: %v", manual.Line(c), err)
		}
	}
}

// The help of a command is about that command, however it is asked for.
func TestHelp(t *testing.T) {
	for _, c := range [][2]string{
		{"help image pull", "Usage: minicri image pull REFERENCE"},
		{"image pull --help", "Usage: minicri image pull REFERENCE"},
		{"image --help", "\n  ls "},
		{"image list -h", "Usage: minicri image ls"},
		{"help config", "\n  show "},
		{"config --help", "\n  show "},
		{"version --help", "Usage: minicri version"},
		{"help help", "Usage: minicri help"},
		{"pods --help", "Flags of all commands, see minicri --help:\n  --certs-dir "},
		{"timeline web --since 5m -h", "Examples:\n  minicri timeline nginx\n"},
		{"help", "Look at pods and the node:\n"},
		{"--help", "      --socket "},
		{"--version", "minicri " + version + "\n"},
		{"-v", "minicri " + version + "\n"},
		{"completion bash", "__start_minicri"},
	} {
		var output bytes.Buffer
		err := command(t.Context(), strings.Fields(c[0]), &output)
		harness.Want(t, err == nil && strings.Contains(output.String(), c[1]), "minicri %s: %v, %s", c[0], err, output.String())
	}
}

// A command line that means nothing is a Misuse of one line that names the command, and the probable intention.
func TestMisuse(t *testing.T) {
	for _, c := range [][2]string{
		{"help nothing", `unknown command "minicri nothing": see minicri --help`},
		{"timelin", `did you mean "timeline"?`},
		{"chekc", `did you mean "check"?`},
		{"image", "minicri image: the command is missing"},
		{"image fetch", `unknown command "minicri image fetch"`},
		{"image lst", `did you mean "ls"?`},
		{"image pull", "REFERENCE is missing"},
		{"image ls --sockt x", `unknown flag --sockt: did you mean "socket"?`},
		{"pods --wid", `unknown flag --wid: did you mean "wide"?`},
		{"pods web db", `minicri pods takes no argument "db"`},
		{"pods -o x", "-o x: the forms are table, json and yaml"},
		{"pods --json -o yaml", "contradict each other"},
		{"pods --phase NONSENSE", "Ready, NotReady and Creating"},
		{"check --force", "only with --fix"},
		{"check nonsense", `takes no argument "nonsense"`},
		{"config", "the command is missing"},
		{"config nothing", "unknown command"},
		{"config default more", `takes no argument "more"`},
		{"debug", "the command is missing"},
		{"--sockt x", `did you mean "socket"?`},
		{"timeline a b c", `takes no argument "c"`},
		{"timeline --since -5m", "in the future"},
		{"timeline --since yesterday", "invalid argument"},
		{"timeline --slowest -1", "number of pods"},
		{"logs nginx", "use crictl logs nginx"},
		{"exec -it nginx sh", "use crictl exec -it nginx sh"},
		{"stop", "use crictl stop ID"},
	} {
		err := command(t.Context(), strings.Fields(c[0]), io.Discard)
		_, misuse := errors.AsType[manual.Misuse](err)
		harness.Want(t, misuse, "minicri %s: %T", c[0], err)
		harness.Need(t, err != nil, "minicri %s: %v", c[0], err)
		harness.Want(t, strings.Contains(err.Error(), c[1]), "minicri %s: %v", c[0], err)
		harness.Want(t, !strings.Contains(err.Error(), "\n"), "minicri %s: %v", c[0], err)
	}
}

func must(t testing.TB, err error) { t.Helper(); harness.Check(t, err) }

// changeAll makes every key of a configuration another one.
func changeAll(t *testing.T, table reflect.Value) {
	t.Helper()
	for i := range table.NumField() {
		switch field := table.Field(i); field.Kind() {
		case reflect.Struct:
			changeAll(t, field)
		case reflect.Bool:
			field.SetBool(!field.Bool())
		case reflect.String:
			field.SetString(field.String() + "x")
		case reflect.Int, reflect.Int64:
			field.SetInt(field.Int() + 1)
		case reflect.Float64:
			field.SetFloat(field.Float() + 1)
		case reflect.Slice:
			field.Set(reflect.Append(field, reflect.Zero(field.Type().Elem())))
		case reflect.Map:
			changed := reflect.MakeMap(field.Type())
			changed.SetMapIndex(reflect.ValueOf("x"), reflect.Zero(field.Type().Elem()))
			field.Set(changed)
		default:
			t.Fatalf("a key of the kind %v", field.Kind())
		}
	}
}

// Each key is either in force after a reload or named as one that needs a restart, never both and never neither.
func TestEachKeyIsReloadedOrNamed(t *testing.T) {
	before, fresh := config.Default(), config.Default()
	changeAll(t, reflect.ValueOf(fresh).Elem())
	now := before.Reloaded(fresh)
	keys := func(was, is *config.Config) []string {
		return changedKeys(reflect.ValueOf(was).Elem(), reflect.ValueOf(is).Elem(), "")
	}
	all, applied := keys(before, fresh), keys(before, now)
	harness.Want(t, len(all) >= 60, "only %d keys: %q", len(all), all)
	for _, key := range all {
		harness.Same(t, key+" is in force", slices.Contains(applied, key), config.IsReloaded(key))
	}
	for _, key := range []string{"log_level", "limits.cni_add", "limits.shutdown", "runtimes", "default_network.enabled", "images.certs_dirs", "nri.required_plugins", "nri.request_timeout", "nri.enabled", "nri.socket"} {
		harness.Want(t, slices.Contains(applied, key), "%s is not reloaded", key)
	}
}

// What the daemon refuses at its start is refused by the check, with its key.
func TestConfigCheck(t *testing.T) {
	dir := t.TempDir()
	fifo, base, link := filepath.Join(dir, "fifo"), filepath.Join(dir, "base.json"), filepath.Join(dir, "link")
	must(t, errors.Join(unix.Mkfifo(fifo, 0o600), os.WriteFile(base, []byte("{}"), 0o600), os.Symlink("/nowhere", link)))
	taken, port := listenAt(t, "unix", filepath.Join(dir, "nri.sock")).Addr().String(), listenAt(t, "tcp", "127.0.0.1:0").Addr().String()
	inUse := filepath.Join(dir, "in-use")
	must(t, os.MkdirAll(filepath.Join(inUse, "sandboxes"), 0o700))
	_, err := node.Open(inUse, "/run/minicri", "/run/netns")
	must(t, errors.Join(err, os.WriteFile(filepath.Join(inUse, "sandboxes", "0.json"), nil, 0o600)))
	below := fmt.Sprintf("root = %q\nstate = %q\nnetns_dir = %q", dir+"/r/r", dir+"/s/s", dir+"/n/n")
	for text, key := range map[string]string{
		below:                               "",
		fmt.Sprintf("base_spec = %q", base): "",
		`base_spec = "/nowhere/base.json"`:  "base_spec",
		fmt.Sprintf("base_spec = %q", fifo): "base_spec",
		"[runtimes.strict]\ntype = \"builtin\"\nbase_spec = \"/nowhere/base.json\"":          "runtimes.strict.base_spec",
		fmt.Sprintf("[runtimes.strict]\ntype = \"builtin\"\nbase_spec = %q", t.TempDir()):    "runtimes.strict.base_spec",
		`default_sysctls = ["kernel.panic=1"]`:                                               "default_sysctls",
		"socket = '/s'\nsockt = '/t'":                                                        `:2: unknown key "sockt"`,
		"\n[streaming]\ntls_cert = '/nowhere/c'\ntls_key = '/nowhere/k'":                     ":3: streaming.tls_cert",
		`default_seccomp = "localhost//nowhere/profile.json"`:                                ":1: default_seccomp",
		`default_seccomp = "localhost/profile.json"`:                                         ":1: default_seccomp",
		fmt.Sprintf("default_seccomp = \"localhost/%s\"", base):                              "",
		fmt.Sprintf("default_seccomp = \"localhost/%s\"", filepath.Join(dir, "config.toml")): ":1: default_seccomp",
		`default_apparmor = "localhost/not-loaded"`:                                          ":1: default_apparmor",
		`default_capabilities = ["CHOWN", "CAP_KILL", "ALL"]`:                                "",
		`default_capabilities = ["CHWON"]`:                                                   ":1: default_capabilities",
		`default_ulimits = ["files=1"]`:                                                      "default_ulimits",
		"cgroup_driver = 'systemd'\ncgroup_parent = '/pods'":                                 ":2: cgroup_parent",
		"cgroup_parent = \"/a\\nb\"":                                                         ":1: cgroup_parent",
		`shim = "/nowhere"`:                                                                  ":1: shim",
		fmt.Sprintf("shim = %q", dir):                                                        ":1: shim",
		`metrics_address = "192.0.2.1:0"`:                                                    ":1: metrics_address",
		"[streaming]\naddress = '192.0.2.1:0'":                                               ":2: streaming.address",
		fmt.Sprintf("[streaming]\naddress = %q", port):                                       ":2: streaming.address",
		fmt.Sprintf("[nri]\nenabled = true\nsocket = %q", taken):                             "", // the daemon works without plugins
		fmt.Sprintf("[nri]\nenabled = true\nsocket = %q", fifo):                              ":3: nri.socket",
		fmt.Sprintf("[nri]\nenabled = false\nsocket = %q", taken):                            "",
		`root = "/dev/null/x"`:                                                               ":1: root",
		fmt.Sprintf("netns_dir = %q", fifo):                                                  ":1: netns_dir",
		fmt.Sprintf("netns_dir = %q", link):                                                  ":1: netns_dir",
		fmt.Sprintf("socket = %q", fifo):                                                     ":1: socket",
		`socket = "/dev/pts/s"`:                                                              ":1: socket",
		`socket = "/run/x/"`:                                                                 ":1: socket",
		`socket = "/run/minicri/debug.sock"`:                                                 ":1: socket",
		"root = '/run/x'\nsocket = '/run/x'":                                                 ":2: socket",
		"socket = '/run/x'\n[nri]\nenabled = true\nsocket = '/run/x'":                        ":4: nri.socket",
		"[nri]\nenabled = true\nsocket = '/run/minicri/nri.sock'":                            ":3: nri.socket",
		"[nri]\nsocket = '/run/minicri/nri.sock'":                                            ":2: nri.socket",
		"[nri]\nenabled = false\nsocket = '/run/minicri/nri.sock'":                           "",
		`state = "/dev/null/x"`:                                                              ":1: state",
		`socket = "/proc/s"`:                                                                 ":1: socket",
		fmt.Sprintf("root = %q\nstate = '/other'", inUse):                                    ":2: state",
	} {
		file := filepath.Join(dir, "config.toml")
		must(t, os.WriteFile(file, []byte(text+"\n"), 0o600))
		arguments := []string{"config", "check", file}
		if !strings.HasPrefix(text, "shim") {
			arguments = append(arguments, "--shim", base) // these tests have none beside them
		}
		err := command(t.Context(), arguments, io.Discard)
		harness.Want(t, (err != nil) == (key != ""), "%s: %v", text, err)
		harness.Want(t, (err == nil || strings.Contains(err.Error(), key)), "%s: %v", text, err)
	}
	for _, name := range []string{"r", "s", "n"} {
		_, err := os.Stat(filepath.Join(dir, name))
		harness.Want(t, err != nil, "the check has made %s", name)
	}
}

// listenAt listens until the test ends.
func listenAt(t *testing.T, network, address string) net.Listener {
	listener, err := net.Listen(network, address)
	must(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	return listener
}

// Without a FILE it is what a daemon with these flags starts with, which needs none.
func TestConfigCheckWithoutFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "shim")
	must(t, os.WriteFile(file, nil, 0o600))
	var says strings.Builder
	must(t, command(t.Context(), []string{"config", "check", "--shim", file}, &says))
	harness.Want(t, strings.Contains(says.String(), config.DefaultFile+" is valid"), "it says %q", says.String())
	for _, flags := range [][]string{{"--root", "/dev/null/x"}, {"--config", "/nowhere/config.toml"}} {
		err := command(t.Context(), slices.Concat([]string{"config", "check", "--shim", file}, flags), io.Discard)
		harness.Want(t, err != nil, "%v is valid", flags)
	}
}

// Each value is shown with its source, and what is wrong with the files is an error.
func TestConfigShow(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.toml")
	must(t, os.WriteFile(file, []byte("socket = '/nowhere/s'\n[limits]\nrun = '4m'\nrum = '5m'\n"), 0o600))
	var output strings.Builder
	err := command(t.Context(), []string{"config", "show", "--config", file, "--root", "/r"}, &output)
	harness.WantError(t, err, file+":4: unknown key")
	for _, line := range []string{"socket = '/nowhere/s'  # " + file + ":1\n", "root = '/r'  # --root\n", "limits.run = '4m0s'  # " + file + ":3\n", "limits.kill = '10s'  # default\n", "runtimes.runc.type = 'builtin'  # default\n"} {
		harness.Want(t, strings.Contains(output.String(), line), "no line %q in\n%s", line, output.String())
	}
	output.Reset()
	served := listenAt(t, "unix", filepath.Join(t.TempDir(), "s"))
	go func() { _ = http.Serve(served, nil) }() // no gRPC
	err = command(t.Context(), []string{"config", "show", "--socket", served.Addr().String()}, &output)
	harness.Want(t, err != nil && strings.Contains(output.String(), "limits.kill = '10s'  # default\n"), "with a daemon that gives no status it shows %q", output.String())
	output.Reset()
	must(t, showConfig(&output, &config.Loaded{Config: config.Default()}, map[string]any{"log_level": "warn"}))
	now := "log_level = 'info'  # default; the daemon that runs has warn: "
	harness.Want(t, strings.Contains(output.String(), now), "no line %q in\n%s", now, output.String())
}

// A process that a killed daemon was starting holds the socket and the locks of that daemon until execve(2). The next
// daemon waits for both.
func TestClaimWaitsForTheProcessesOfAKilledDaemon(t *testing.T) {
	dir := t.TempDir()
	c := &config.Config{Root: dir + "/root", State: dir + "/state", Socket: dir + "/socket"}
	unlock, err := claim(t.Context(), c)
	harness.Check(t, err)
	listener, err := net.Listen("unix", c.Socket)
	harness.Check(t, err)
	synctest.Test(t, func(t *testing.T) {
		claimed := make(chan error, 1)
		go func() {
			unlock, err := claim(t.Context(), c)
			if err == nil {
				unlock()
			}
			claimed <- err
		}()
		for _, release := range []func(){func() { _ = listener.Close() }, unlock} {
			time.Sleep(10 * claimPause)
			harness.Same(t, "claims that have ended", len(claimed), 0)
			release()
		}
		harness.Check(t, <-claimed)
	})
}
