// Package manual describes the commands of minicri: the usage text, the manual page and the shell
// completions are made of this list. It keeps no state. hack/manual renders the pages.
package manual

import (
	"flag"
	"fmt"
	"strings"
)

// Command is one command of minicri.
type Command struct {
	Words      string // "config check"
	Argument   string // what follows; FILE is completed
	Help       string
	Flags      []Flag
	Configured bool // the command takes the daemon's flags too
}

// Flag is a flag of a command.
type Flag struct {
	Name  string
	Value string // "" for a flag that is given or not
	Help  string
}

// Commands returns all commands in the order of the usage text.
func Commands() []Command {
	pull := []Flag{{"creds", "USER:PASSWORD", "credentials for the registry"}, {"platform", "OS/ARCH[/VARIANT]", "of the image to pull; the node's if empty"}}
	asJSON := Flag{"json", "", "print JSON"}
	force := Flag{"force", "", "replace the file if it is there"}
	return []Command{
		{Words: "config default", Help: "print the default configuration, every key with its comment"},
		{Words: "config check", Argument: "[FILE]", Help: "check a configuration file and its drop-ins, FILE.d/*.toml: all that the daemon refuses at its start on this machine, and keys that it does not know; without FILE that of the daemon", Configured: true},
		{Words: "config show", Help: "print every key with the value that is in force and where it is from: a file and its line, a flag, or the default", Configured: true},
		{Words: "config from-containerd", Argument: "FILE", Help: "print the configuration for a file of containerd's, with what has no counterpart as comments"},
		{
			Words: "check", Argument: "[ID...]", Help: "report what this node lacks and what was left behind; exit code 0 only without a problem, which a record in quarantine is too", Configured: true,
			Flags: []Flag{{"fix", "", "remove what was left behind, and try records in quarantine again"}, {"force", "", "with --fix: remove the records in quarantine that cannot be put back; with ids, only theirs, and give up the attachments that have them"}, asJSON, {"pod", "", "run a pod of the embedded pause by way of the daemon, and remove it; exit code 0 means that it ran"}},
		},
		{
			Words: "timeline", Argument: "[POD]", Configured: true,
			Help: "show the life of a pod step by step, of one that is gone or failed too; without a name list all. POD is a name, NAMESPACE/NAME, an id, or the same of a container",
			Flags: []Flag{
				{"failed", "", "only those in which something failed"},
				{"since", "DURATION", "only those in which something happened since then: 10m"},
				{"slowest", "N", "the N that took longest, the slowest first"},
				asJSON,
			},
		},
		{
			Words: "pods", Argument: "[POD]", Configured: true, Help: "show the pods of the node, one line each: id, state and stage, age, containers, memory, addresses, what is wrong with the network; POD is a part of their names, or the beginning of an id",
			Flags: []Flag{
				{"watch", "", "look again every two seconds, with the rates of CPU and network"},
				{"wide", "", "whole ids and names, what the runtime takes for each pod, and the supervisors of older builds, their version and how many pods they have"},
				{"n", "NAMESPACE", "only the pods of this namespace"},
				{"phase", "STATE", "only those in this state: ready, 'not ready', 'being made'"},
				{"o", "FORM", "table, json or yaml"},
				asJSON,
			},
		},
		{Words: "debug bundle", Argument: "FILE", Configured: true, Help: "collect in a tar.gz what a maintainer asks for: configuration, timelines, metrics, stacks, what check finds; without secrets", Flags: []Flag{force}},
		{Words: "image import", Argument: "FILE", Help: "import the images of an archive (docker save, OCI layout); - is stdin", Configured: true},
		{Words: "image pull", Argument: "REFERENCE", Help: "pull an image", Configured: true, Flags: pull},
		{Words: "image save", Argument: "REFERENCE FILE", Help: "write an image as an archive (OCI layout, also for docker load); - is stdout", Configured: true, Flags: []Flag{force}},
		{Words: "image inspect", Argument: "REFERENCE", Help: "print all that is known of an image, in JSON", Configured: true},
		{Words: "image tag", Argument: "REFERENCE NAME", Help: "give an image one more name", Configured: true},
		{Words: "image untag", Argument: "NAME", Help: "remove one name of an image, and the image with its last one", Configured: true},
		{Words: "image ls", Help: "list the images, with the digests by which registries have them", Configured: true, Flags: []Flag{asJSON}},
		{Words: "image rm", Argument: "REFERENCE", Help: "remove an image with all its names", Configured: true},
		{Words: "version", Help: "print the version"},
		{Words: "help", Argument: "[COMMAND]", Help: "print this list, or what one command does and its flags"},
	}
}

// Flags adds the flags of all commands whose first word is name.
func Flags(name string, set *flag.FlagSet) {
	for _, c := range Commands() {
		if first, _, _ := strings.Cut(c.Words, " "); first == name {
			c.addFlags(set)
		}
	}
}

func (c Command) addFlags(set *flag.FlagSet) {
	for _, f := range c.Flags {
		switch {
		case set.Lookup(f.Name) != nil: // of another verb
		case f.Value == "":
			set.Bool(f.Name, false, f.Help)
		default:
			set.String(f.Name, "", "`"+f.Value+"`: "+f.Help)
		}
	}
}

// Line is the command as it is typed: "config check FILE".
func (c Command) Line() string { return strings.TrimSpace(c.Words + " " + c.Argument) }

// Describe prints what the command does, its flags, and the daemon's flags in the set.
func (c Command) Describe(set *flag.FlagSet) {
	c.addFlags(set)
	fmt.Fprintf(set.Output(), "Usage: minicri %s [flags]\n\n%s%s.\n\n", c.Line(), strings.ToUpper(c.Help[:1]), c.Help[1:])
	set.PrintDefaults()
}

// DescribeDaemon makes the usage text of minicri without a command.
func DescribeDaemon(set *flag.FlagSet) {
	set.Usage = func() {
		fmt.Fprint(set.Output(), "Usage: minicri [flags]\n\nServe the CRI in the foreground. `minicri help` lists the commands.\n\n")
		set.PrintDefaults()
	}
}

// Usage lists all commands.
func Usage() string {
	var b strings.Builder
	b.WriteString("minicri runs pods for a kubelet (Kubernetes CRI v1).\n\n")
	line := func(what, help string) { fmt.Fprintf(&b, "  minicri %-22s %s\n", what, help) }
	line("[flags]", "serve the CRI in the foreground; minicri --help lists the flags")
	for _, c := range Commands() {
		line(c.Line(), c.Help)
	}
	return b.String()
}

// UsageOf lists the commands whose first word is group.
func UsageOf(group string) string {
	var b strings.Builder
	for _, c := range Commands() {
		if strings.HasPrefix(c.Words, group+" ") {
			fmt.Fprintf(&b, "  minicri %-28s %s\n", c.Line(), c.Help)
		}
	}
	return b.String()
}
