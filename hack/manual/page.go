package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/manual"
)

// program has the commands without their actions.
var program = manual.Program(nil, nil)

// page is a manual page in the macros of man(7).
type page struct{ strings.Builder }

func newPage(name, section, title, what string) *page {
	p := &page{}
	fmt.Fprintf(p, ".TH %s %s \"\" minicri \"%s\"\n.ad l\n", strings.ToUpper(name), section, title)
	p.section("NAME")
	p.text(name + ` \- ` + roff(what))
	return p
}

func (p *page) section(name string) { fmt.Fprintf(p, ".SH %s\n", name) }

// text is a paragraph, roff already.
func (p *page) text(text string) { fmt.Fprintf(p, ".PP\n%s\n", text) }

// item is a bold term and its description.
func (p *page) item(term, what string) { fmt.Fprintf(p, ".TP\n.B %s\n%s\n", roff(term), roff(what)) }

// list adds a section of terms.
func (p *page) list(section string, items [][2]string) {
	p.section(section)
	for _, item := range items {
		p.item(item[0], item[1])
	}
}

// roff keeps a text from being read as macros and escapes.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(text)
	if strings.HasPrefix(text, ".") || strings.HasPrefix(text, "'") {
		text = `\&` + text
	}
	return text
}

// daemonFlags are the flags of the daemon and of all commands.
func daemonFlags() (flags []*pflag.Flag) {
	program.PersistentFlags().VisitAll(func(f *pflag.Flag) { flags = append(flags, f) })
	return flags
}

// programPage is minicri(8).
func programPage() string {
	p := newPage("minicri", "8", "System Administration", "a Kubernetes container runtime (CRI v1)")
	p.section("SYNOPSIS")
	p.text(".B minicri\n[FLAGS]")
	for _, c := range manual.Commands(program) {
		p.text(".B minicri " + roff(synopsis(c)))
	}
	p.section("DESCRIPTION")
	p.text(roff("Without a command minicri is the daemon. It runs in the foreground, and serves the CRI on a unix socket until " +
		"SIGTERM or SIGINT. Pods keep running without it, and the next daemon finds them."))
	p.section("COMMANDS")
	for _, c := range manual.Commands(program) {
		p.item(manual.Line(c), c.Long)
		for _, f := range manual.Flags(c) {
			_, help := pflag.UnquoteUsage(f)
			fmt.Fprintf(p, ".RS\n.TP\n.B %s\n%s\n.RE\n", roff(manual.Typed(f)), roff(help))
		}
	}
	p.section("FLAGS")
	for _, f := range daemonFlags() {
		_, help := pflag.UnquoteUsage(f)
		if f.DefValue != "" && f.DefValue != "[]" {
			help += " (default " + f.DefValue + ")"
		}
		p.item("--"+f.Name, help)
	}
	p.list("EXIT STATUS", [][2]string{
		{"0", "success; for check: no problem"},
		{"1", "failure; for check: the node has a problem"},
		{"2", "invalid command line"},
	})
	p.list("ENVIRONMENT", [][2]string{
		{"HTTPS_PROXY, HTTP_PROXY, NO_PROXY", "proxies for pulls"},
		{"NO_COLOR", "if set, no colors on a terminal"},
		{"PATH", "programs of the daemon: credential helpers, nft, iptables, apparmor_parser, helpers of OCI runtimes"},
	})
	p.list("SIGNALS", [][2]string{
		{"SIGHUP", "read the configuration again; the log names changed keys that need a restart"},
		{"SIGTERM, SIGINT", "finish running calls, limits.shutdown at most, and exit; pods keep running"},
		{"SIGUSR1", "run CNI CHECK for all pods"},
	})
	c := config.Default()
	p.list("FILES", [][2]string{
		{config.DefaultFile, "configuration, see minicri.toml(5)"},
		{config.DefaultFile + ".d/*.toml", "drop-ins"},
		{"/etc/minicri/certs.d/HOST/hosts.toml", "mirrors, certificates and headers of a registry; then /etc/containerd/certs.d"},
		{"/etc/default/minicri", "environment of the daemon, for the systemd unit"},
		{"/etc/crictl.yaml", "socket for crictl"},
		{c.CNIConf, "CNI network configurations"},
		{c.Socket, "socket of the CRI"},
		{c.State + "/debug.sock", "socket of the commands, only for root"},
		{c.Root, "data that survives a reboot: records, images, timelines"},
		{c.State, "data that a reboot removes"},
	})
	p.list("EXAMPLES", [][2]string{
		{"minicri status", "show the state of the runtime"},
		{"minicri check", "find the problems of the node"},
		{"minicri check --pod", "run a pod, and remove it"},
		{"minicri timeline nginx", "show why the pod nginx is slow or failed"},
		{"minicri timeline --failed --since 1h", "list the failures of the last hour"},
		{"minicri pods -n kube-system --wide", "list the pods of a namespace"},
		{"minicri image pull --creds user:password registry.example/app:v1", "pull a private image"},
		{"minicri config from-containerd /etc/containerd/config.toml", "convert a configuration"},
		{"systemctl reload minicri", "apply a changed configuration"},
	})
	p.section("SEE ALSO")
	p.text(roff("minicri.toml(5), crictl, kubelet"))
	return p.String()
}

func synopsis(c *cobra.Command) string {
	words, arguments, _ := strings.Cut(c.Use, " ")
	parts := []string{strings.TrimSuffix(strings.TrimPrefix(c.CommandPath(), "minicri "), words) + words}
	for _, f := range manual.Flags(c) {
		parts = append(parts, "["+manual.Typed(f)+"]")
	}
	return strings.TrimSpace(strings.Join(append(parts, arguments), " "))
}

// filePage is minicri.toml(5).
func filePage() string {
	p := newPage("minicri.toml", "5", "File Formats", "configuration of minicri")
	p.section("DESCRIPTION")
	p.text(roff("A file in TOML: " + config.DefaultFile + ", or the file of --config, and its drop-ins FILE.d/*.toml by name. Flags override " +
		"the files. minicri config check FILE checks a file; minicri config default prints one with all keys."))
	p.section("KEYS")
	for _, key := range config.Keys() {
		if key.Table {
			fmt.Fprintf(p, ".SS [%s]\n%s\n", roff(key.Name), roff(sentence(key.Comment)+"."))
			continue
		}
		what := meaning(config.Key{Comment: key.Comment, Zero: key.Zero, Kind: key.Kind})
		if key.Default != "" {
			what += " (" + key.Kind + ", default " + key.Default + ")"
		}
		p.item(key.Name, what)
	}
	p.section("SEE ALSO")
	p.text("minicri(8)")
	return p.String()
}
