package main

import (
	"flag"
	"fmt"
	"io"
	"strings"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/manual"
)

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

// item is a term, bold, and what it is.
func (p *page) item(term, what string) { fmt.Fprintf(p, ".TP\n.B %s\n%s\n", roff(term), roff(what)) }

// roff keeps a text from being read as macros and escapes.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(text)
	if strings.HasPrefix(text, ".") || strings.HasPrefix(text, "'") {
		text = `\&` + text
	}
	return text
}

// daemonFlags are the flags of the daemon, by name.
func daemonFlags() (flags []*flag.Flag) {
	set := flag.NewFlagSet("minicri", flag.ContinueOnError)
	set.SetOutput(io.Discard)
	var file string
	config.Default().Flags(set, &file)
	set.VisitAll(func(f *flag.Flag) { flags = append(flags, f) })
	return flags
}

// programPage is minicri(8).
func programPage() string {
	p := newPage("minicri", "8", "System Administration", "a Kubernetes container runtime (CRI v1)")
	p.section("SYNOPSIS")
	p.text(".B minicri\n[FLAGS]")
	for _, c := range manual.Commands() {
		p.text(strings.TrimSpace(".B minicri " + roff(c.Words) + "\n" + roff(synopsis(c))))
	}
	p.section("DESCRIPTION")
	p.text(roff("Without a command minicri is the daemon, in the foreground: it serves the CRI on a unix socket until SIGTERM or SIGINT. Pods keep running while it is away, and the next daemon finds them. SIGUSR1 makes it run CNI CHECK for every pod."))
	p.section("COMMANDS")
	for _, c := range manual.Commands() {
		p.item(c.Line(), c.Help)
		for _, f := range c.Flags {
			fmt.Fprintf(p, ".RS\n.TP\n.B %s\n%s\n.RE\n", roff(strings.TrimSpace("--"+f.Name+" "+f.Value)), roff(f.Help))
		}
	}
	p.section("FLAGS")
	for _, f := range daemonFlags() {
		_, help := flag.UnquoteUsage(f)
		if f.DefValue != "" {
			help += " (default " + f.DefValue + ")"
		}
		p.item("--"+f.Name, help)
	}
	p.section("FILES")
	c := config.Default()
	p.item(config.DefaultFile, "the configuration, see minicri.toml(5)")
	p.item(c.Socket, "the CRI")
	p.item(c.Root, "what has to survive a reboot")
	p.item(c.State, "what a reboot may remove")
	p.section("SEE ALSO")
	p.text(roff("minicri.toml(5), crictl, kubelet"))
	return p.String()
}

func synopsis(c manual.Command) string {
	parts := []string{}
	for _, f := range c.Flags {
		parts = append(parts, "["+strings.TrimSpace("--"+f.Name+" "+f.Value)+"]")
	}
	if c.Configured {
		parts = append(parts, "[FLAGS]")
	}
	return strings.TrimSpace(strings.Join(append(parts, c.Argument), " "))
}

// filePage is minicri.toml(5).
func filePage() string {
	p := newPage("minicri.toml", "5", "File Formats", "configuration of minicri")
	p.section("DESCRIPTION")
	p.text(roff("A file in TOML: " + config.DefaultFile + ", or what --config names, and its drop-ins FILE.d/*.toml by name. Flags replace what the files say. Check a file with minicri config check FILE; minicri config default prints one with all keys."))
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
