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
	Argument   string // the argument; the shell completes FILE
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

// Typed returns the flag as it is typed: -n for a letter, --wide for a word.
func (f Flag) Typed() string {
	if len(f.Name) == 1 {
		return "-" + f.Name
	}
	return "--" + f.Name
}

// Commands returns all commands in the order of the usage text.
func Commands() []Command {
	pull := []Flag{
		{"creds", "USER:PASSWORD", "credentials for the registry"},
		{"platform", "OS/ARCH[/VARIANT]", "platform of the image; the default is the platform of the node"},
	}
	asJSON := Flag{"json", "", "print JSON"}
	force := Flag{"force", "", "overwrite an existing file"}
	return []Command{
		{Words: "config default", Help: "print the default configuration, every key with its comment"},
		{
			Words: "config check", Argument: "[FILE]", Configured: true,
			Help: "check a configuration file and its drop-ins FILE.d/*.toml: report everything that the daemon would refuse on " +
				"this machine, and unknown keys; without FILE check the file of the daemon",
		},
		{
			Words: "config show", Configured: true,
			Help: "print every key with its value and its source: file and line, flag, or default",
		},
		{
			Words: "config from-containerd", Argument: "FILE",
			Help: "print the configuration for a containerd file; keys without a counterpart become comments",
		},
		{
			Words: "check", Argument: "[ID...]", Configured: true,
			Help: "report problems of this node and leftovers of pods and containers; the exit status is 0 only without a " +
				"problem; records in quarantine are problems",
			Flags: []Flag{
				{"fix", "", "remove leftovers, and load records in quarantine again"},
				{
					"force", "", "with --fix: remove records in quarantine that cannot be loaded; with IDs, remove only theirs, " +
						"and abandon their network attachments",
				},
				asJSON,
				{"pod", "", "run a pod with the embedded pause image through the daemon, and remove it; exit status 0 means that it ran"},
			},
		},
		{
			Words: "timeline", Argument: "[POD]", Configured: true,
			Help: "show each step of a pod, also of a removed or failed one; without POD list all pods and images. POD is a name, " +
				"NAMESPACE/NAME or an id, of a pod or a container",
			Flags: []Flag{
				{"failed", "", "only entries with a failure"},
				{"since", "DURATION", "only entries with an event in this time: 10m"},
				{"slowest", "N", "the N slowest entries, the slowest first"},
				asJSON,
			},
		},
		{
			Words: "pods", Argument: "[POD]", Configured: true,
			Help: "list the pods of the node: id, state and stage, age, containers, memory, addresses, network problems; POD is a " +
				"part of the name or the beginning of the id",
			Flags: []Flag{
				{"watch", "", "refresh every two seconds, with rates of CPU and network"},
				{"wide", "", "full ids and names, cost of the runtime for each pod, and supervisors of older builds with version and pods"},
				{"n", "NAMESPACE", "only pods of this namespace"},
				{"phase", "STATE", "only pods in this state: ready, 'not ready', 'being made'"},
				{"o", "FORM", "table, json or yaml"},
				asJSON,
			},
		},
		{
			Words: "debug bundle", Argument: "FILE", Configured: true, Flags: []Flag{force},
			Help: "write a tar.gz for bug reports: configuration, timelines, metrics, stacks and the findings of check, without secrets",
		},
		{
			Words: "image import", Argument: "FILE", Configured: true,
			Help: "import the images of an archive (docker save, OCI layout); - is stdin",
		},
		{Words: "image pull", Argument: "REFERENCE", Help: "pull an image", Configured: true, Flags: pull},
		{
			Words: "image save", Argument: "REFERENCE FILE", Configured: true, Flags: []Flag{force},
			Help: "write an image as an archive (OCI layout, also for docker load); - is stdout",
		},
		{Words: "image inspect", Argument: "REFERENCE", Help: "print everything about an image as JSON", Configured: true},
		{Words: "image tag", Argument: "REFERENCE NAME", Help: "add a name to an image", Configured: true},
		{Words: "image untag", Argument: "NAME", Help: "remove one name of an image; the last name removes the image", Configured: true},
		{Words: "image ls", Help: "list the images with the digests in their registries", Configured: true, Flags: []Flag{asJSON}},
		{Words: "image rm", Argument: "REFERENCE", Help: "remove an image with all its names", Configured: true},
		{Words: "version", Help: "print the version"},
		{Words: "help", Argument: "[COMMAND]", Help: "list the commands, or describe one command and its flags"},
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
		case set.Lookup(f.Name) != nil: // another verb has it, too
		case f.Value == "":
			set.Bool(f.Name, false, f.Help)
		default:
			set.String(f.Name, "", "`"+f.Value+"`: "+f.Help)
		}
	}
}

// Line is the command as it is typed: "config check FILE".
func (c Command) Line() string { return strings.TrimSpace(c.Words + " " + c.Argument) }

// Describe prints the help of the command, its flags, and the daemon's flags in the set.
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
