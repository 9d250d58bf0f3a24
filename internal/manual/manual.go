// Package manual describes the command line of minicri as a tree of cobra commands: names, arguments, flags, help and
// examples. cmd/minicri adds the actions. The manual page and the tests of docs/ read the same tree. It keeps no state.
package manual

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/minicri/minicri/internal/config"
)

// Action runs a command. Its errors of the type Misuse lead to exit code 2.
type Action func(cmd *cobra.Command, arguments []string) error

// Misuse is an invalid command line.
type Misuse struct{ error }

func (m Misuse) Unwrap() error { return m.error }

// Misused returns a Misuse.
func Misused(format string, values ...any) error { return Misuse{fmt.Errorf(format, values...)} }

// group is a section of the list of commands.
type group string

const (
	looks  group = "Look at pods and the node"
	cares  group = "Care for the node"
	images group = "Images"
	others group = "Other commands"
)

// entry describes one command. Its words are those before its arguments: "image pull".
type entry struct {
	words, arguments string
	aliases          []string // other last words
	least, most      int      // number of arguments, most < 0 for any number
	short            string
	long             string // more than the short help, "" for nothing more
	examples         []string
	flags            func(*pflag.FlagSet)
	section          group
	names            string // the completion of the arguments: "pods", "images", "files" or ""
}

func asJSON(set *pflag.FlagSet) {
	set.Bool("json", false, "print JSON, as -o json")
	set.StringP("output", "o", "", "print in the `FORM` table, json or yaml")
}

func force(set *pflag.FlagSet) { set.Bool("force", false, "overwrite an existing file") }

func watch(set *pflag.FlagSet) { set.BoolP("watch", "w", false, "refresh every two seconds") }

// entries has each group before its commands.
var entries = []entry{
	{
		words: "pods", arguments: "[POD]", aliases: []string{"pod", "ps"}, most: 1, section: looks, names: "pods",
		short: "list the pods of the node",
		long: "Each line has id, state and stage, age, running and exited containers, memory, addresses and network " +
			"problems. POD is a part of the name or the beginning of the id.",
		examples: []string{"minicri pods -n kube-system --wide", "minicri pods --phase NotReady", "minicri pods --watch"},
		flags: func(set *pflag.FlagSet) {
			watch(set)
			asJSON(set)
			set.Bool("wide", false, "show full ids, the cost of the runtime for each pod, and supervisors of older builds")
			set.StringP("namespace", "n", "", "show only pods of this `NAMESPACE`")
			set.String("phase", "", "show only pods in this `STATE`: Ready, NotReady or Creating")
		},
	},
	{
		words: "timeline", arguments: "[POD]", most: 2, section: looks, names: "pods",
		short: "show each step of a pod, also of a removed or failed one",
		long: "Without POD it lists all pods and images. POD is a name, NAMESPACE/NAME or an id, of a pod or a container, " +
			"or a reference of an image.",
		examples: []string{
			"minicri timeline nginx", "minicri timeline --failed --since 1h", "minicri timeline -f", "minicri timeline nginx --html nginx.html",
		},
		flags: func(set *pflag.FlagSet) {
			asJSON(set)
			set.Bool("failed", false, "show only entries with a failure")
			set.Duration("since", 0, "show only entries with an event in this `DURATION`: 10m")
			set.Int("slowest", 0, "show the `N` slowest entries, the slowest first")
			set.BoolP("follow", "f", false, "print steps when they end, until an interrupt")
			set.String("html", "", "write one page with all details to `FILE`; it needs no network")
		},
	},
	{
		words: "inspect", arguments: "NAME...", least: 1, most: -1, section: looks, names: "pods",
		short: "print everything about pods and containers as JSON",
		long: "NAME is a name, NAMESPACE/NAME, or the beginning of an id, of pods or containers. All objects of a name are " +
			"printed.",
		examples: []string{"minicri inspect nginx", "minicri inspect shop/cart | less"},
		flags:    func(set *pflag.FlagSet) { set.StringP("output", "o", "json", "print in the `FORM` json or yaml") },
	},
	{
		words: "status", section: looks,
		short: "show the state of the runtime on one screen",
		long: "It shows version, uptime, health, readiness and its cause, pods and containers by state, networks, cgroup driver, " +
			"handlers, NRI plugins, supervisors by build, disk use, pulls under way, and the last errors.",
		examples: []string{"minicri status", "minicri status --watch", "minicri status --json"},
		flags:    func(set *pflag.FlagSet) { watch(set); asJSON(set) },
	},
	{
		words: "check", arguments: "[ID...]", most: -1, section: cares,
		short: "report problems of this node, and leftovers of pods and containers",
		long: "The exit status is 0 only without a problem. Records in quarantine are problems. IDs are those of network " +
			"attachments, and go with --fix --force.",
		examples: []string{"minicri check", "minicri check --fix", "minicri check --pod"},
		flags: func(set *pflag.FlagSet) {
			set.Bool("fix", false, "remove leftovers, and load records in quarantine again")
			set.Bool("force", false, "with --fix: remove records in quarantine that cannot be loaded; with IDs, remove only "+
				"theirs, and abandon their network attachments")
			set.Bool("pod", false, "run a pod with the embedded pause image through the daemon, and remove it; exit status 0 means that it ran")
			set.BoolP("quiet", "q", false, "print only problems")
			set.BoolP("verbose", "v", false, "print good findings, and all objects of a problem")
			asJSON(set)
		},
	},
	{words: "config", section: cares, short: "check, show and convert configurations"},
	{
		words: "config check", arguments: "[FILE]", most: 1, names: "files",
		short: "check a configuration file and its drop-ins FILE.d/*.toml",
		long: "It reports everything that the daemon would refuse on this machine, and unknown keys. Without FILE it checks the " +
			"file of the daemon.",
		examples: []string{"minicri config check /etc/minicri/config.toml"},
	},
	{
		words: "config default", short: "print the default configuration, every key with its comment",
		examples: []string{"minicri config default > /etc/minicri/config.toml"},
	},
	{
		words: "config from-containerd", arguments: "FILE", least: 1, most: 1, names: "files",
		short:    "print the configuration for a containerd file",
		long:     "Keys without a counterpart become comments.",
		examples: []string{"minicri config from-containerd /etc/containerd/config.toml"},
	},
	{words: "config show", short: "print every key with its value and its source: file and line, flag, or default"},
	{words: "debug", section: cares, short: "collect data for bug reports"},
	{
		words: "debug bundle", arguments: "FILE", least: 1, most: 1, flags: force, names: "files",
		short:    "write a tar.gz for bug reports",
		long:     "It has configuration, timelines, metrics, stacks and the findings of check, without secrets.",
		examples: []string{"minicri debug bundle /tmp/minicri.tar.gz"},
	},
	{words: "image", aliases: []string{"images", "img"}, section: images, short: "list, pull, import and remove images"},
	{
		words: "image import", arguments: "FILE", least: 1, most: 1, names: "files",
		short:    "import the images of an archive",
		long:     "FILE is an archive of docker save or an OCI layout; - is stdin.",
		examples: []string{"docker save app:v1 | minicri image import -"},
	},
	{words: "image inspect", arguments: "REFERENCE", least: 1, most: 1, names: "images", short: "print everything about an image as JSON"},
	{
		words: "image ls", aliases: []string{"list"}, flags: asJSON,
		short: "list the images with the digests in their registries",
	},
	{
		words: "image pull", arguments: "REFERENCE", least: 1, most: 1, short: "pull an image",
		examples: []string{"minicri image pull --creds user:password registry.example/app:v1"},
		flags: func(set *pflag.FlagSet) {
			set.String("creds", "", "credentials for the registry: `USER:PASSWORD`")
			set.String("platform", "", "platform of the image: `OS/ARCH[/VARIANT]`; the default is the platform of the node")
		},
	},
	{
		words: "image rm", arguments: "REFERENCE", aliases: []string{"remove"}, least: 1, most: 1, names: "images",
		short: "remove an image with all its names",
	},
	{
		words: "image save", arguments: "REFERENCE FILE", least: 2, most: 2, flags: force, names: "images",
		short: "write an image as an archive", long: "The archive is an OCI layout, also for docker load; - is stdout.",
		examples: []string{"minicri image save docker.io/library/nginx:latest nginx.tar"},
	},
	{words: "image tag", arguments: "REFERENCE NAME", least: 2, most: 2, names: "images", short: "add a name to an image"},
	{
		words: "image untag", arguments: "NAME", least: 1, most: 1, names: "images",
		short: "remove one name of an image; the last name removes the image",
	},
	{words: "version", section: others, short: "print the version"},
}

// Program returns the tree of commands with their actions by words. The action "" is the daemon's, and "names" returns
// the completions of a kind: "pods" or "images". Commands without an action print their help.
func Program(actions map[string]Action, names func(cmd *cobra.Command, kind string) []string) *cobra.Command {
	root := &cobra.Command{
		Use: "minicri", SilenceErrors: true, SilenceUsage: true,
		Short: "minicri runs pods for a kubelet (Kubernetes CRI v1)",
		Long:  "minicri runs pods for a kubelet (Kubernetes CRI v1). Without a command it is the daemon, in the foreground.",
		RunE:  actions[""],
		Args:  unknownCommand,
	}
	root.SetFlagErrorFunc(flagError)
	root.SetUsageFunc(usage)
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) { help(cmd) })
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	config.AddFlags(root.PersistentFlags())
	root.PersistentFlags().SortFlags = false
	root.Flags().BoolP("version", "v", false, "print the version")
	for _, section := range []group{looks, cares, images, others} {
		root.AddGroup(&cobra.Group{ID: string(section), Title: string(section) + ":"})
	}
	parents := map[string]*cobra.Command{"": root}
	for _, e := range entries {
		words := strings.Fields(e.words)
		cmd := e.command(actions[e.words], names)
		parents[strings.Join(words[:len(words)-1], " ")].AddCommand(cmd)
		parents[e.words] = cmd
	}
	root.SetHelpCommand(helpCommand(root))
	root.InitDefaultHelpCmd()
	root.CompletionOptions.DisableDefaultCmd = true // cobra would keep the output from before SetOut
	root.AddCommand(completionCommand())
	addOfCrictl(root, actions["crictl"])
	return root
}

func (e entry) command(run Action, names func(*cobra.Command, string) []string) *cobra.Command {
	words := strings.Fields(e.words)
	cmd := &cobra.Command{
		Use: strings.TrimSpace(words[len(words)-1] + " " + e.arguments), Aliases: e.aliases, GroupID: string(e.section),
		Short: e.short, Long: sentence(e.short), Example: strings.Join(e.examples, "\n"),
		RunE: run,
		Args: e.count,
	}
	if e.long != "" {
		cmd.Long += " " + e.long
	}
	if e.group() {
		cmd.RunE = func(cmd *cobra.Command, _ []string) error {
			return Misused("%s: the command is missing: see %s --help", cmd.CommandPath(), cmd.CommandPath())
		}
	}
	cmd.Flags().SortFlags = false
	if e.flags != nil {
		e.flags(cmd.Flags())
	}
	if e.names == "pods" || e.names == "images" {
		cmd.ValidArgsFunction = func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			return names(cmd, e.names), cobra.ShellCompDirectiveNoFileComp
		}
	}
	if e.names == "files" {
		cmd.ValidArgsFunction = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveDefault
		}
	}
	return cmd
}

// group reports whether other entries are commands of this one.
func (e entry) group() bool {
	return slices.ContainsFunc(entries, func(other entry) bool { return strings.HasPrefix(other.words, e.words+" ") })
}

// count checks the number of arguments.
func (e entry) count(cmd *cobra.Command, arguments []string) error {
	switch {
	case cmd.HasSubCommands():
		return unknownCommand(cmd, arguments)
	case len(arguments) < e.least:
		return Misused("%s: %s is missing: see %s --help", cmd.CommandPath(), strings.Fields(e.arguments)[len(arguments)], cmd.CommandPath())
	case e.most >= 0 && len(arguments) > e.most:
		return Misused("%s takes no argument %q: see %s --help", cmd.CommandPath(), arguments[e.most], cmd.CommandPath())
	}
	return nil
}

// unknownCommand is the check of a command that has commands.
func unknownCommand(cmd *cobra.Command, arguments []string) error {
	if len(arguments) == 0 {
		return nil
	}
	var known []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			known = append(append(known, c.Name()), c.Aliases...)
		}
	}
	return Misused("unknown command %q%s: see %s --help", cmd.CommandPath()+" "+arguments[0],
		config.DidYouMean(arguments[0], known), cmd.CommandPath())
}

// flagError names the flag that was probably meant.
func flagError(cmd *cobra.Command, err error) error {
	text := err.Error()
	if given, unknown := strings.CutPrefix(text, "unknown flag: --"); unknown {
		var known []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { known = append(known, f.Name) })
		text = fmt.Sprintf("unknown flag --%s%s", given, config.DidYouMean(given, known))
	}
	return Misused("%s: %s: see %s --help", cmd.CommandPath(), text, cmd.CommandPath())
}

func helpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND]", GroupID: string(others), Short: "list the commands, or describe one command and its flags",
		Long: "List the commands, or describe one command and its flags.",
		RunE: func(_ *cobra.Command, words []string) error {
			cmd, rest, err := root.Find(words)
			if err != nil || len(rest) > 0 && cmd.HasSubCommands() {
				return unknownCommand(cmd, rest)
			}
			help(cmd)
			return nil
		},
	}
}

func completionCommand() *cobra.Command {
	shells := []string{"bash", "zsh", "fish"}
	return &cobra.Command{
		Use: "completion SHELL", GroupID: string(others), ValidArgs: shells,
		Short:   "print the completions for a shell",
		Long:    "Print the completions for bash, zsh or fish. The packages install them.",
		Example: "source <(minicri completion bash)",
		Args: func(cmd *cobra.Command, arguments []string) error {
			if len(arguments) != 1 || !slices.Contains(shells, arguments[0]) {
				return Misused("minicri completion: the shells are bash, zsh and fish: see minicri completion --help")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, arguments []string) error {
			root, output := cmd.Root(), cmd.OutOrStdout()
			switch arguments[0] {
			case "zsh":
				return root.GenZshCompletion(output)
			case "fish":
				return root.GenFishCompletion(output, true)
			}
			return root.GenBashCompletionV2(output, true)
		},
	}
}

// addOfCrictl adds hidden commands for verbs of crictl that a user may try.
func addOfCrictl(root *cobra.Command, run Action) {
	for _, verb := range []string{"attach", "exec", "logs", "port-forward", "rmp", "rm", "rmi", "runp", "start", "stats", "stop", "stopp"} {
		cmd := &cobra.Command{Use: verb, Hidden: true, DisableFlagParsing: true, RunE: run}
		root.AddCommand(cmd)
	}
}

func help(cmd *cobra.Command) {
	fmt.Fprintf(cmd.OutOrStdout(), "%s\n\n", cmd.Long)
	_ = usage(cmd) // always nil
}

// usage prints the flags of a command, and the names of the daemon's flags. Only minicri --help describes those.
func usage(cmd *cobra.Command) error {
	out := cmd.OutOrStdout()
	switch {
	case !cmd.HasParent():
		fmt.Fprint(out, "Usage: minicri [flags]\n       minicri COMMAND\n")
	case cmd.HasAvailableSubCommands():
		fmt.Fprintf(out, "Usage: %s COMMAND\n", cmd.CommandPath())
	default:
		fmt.Fprintf(out, "Usage: %s\n", cmd.UseLine())
	}
	if len(cmd.Aliases) > 0 {
		fmt.Fprintf(out, "Aliases: %s\n", strings.Join(cmd.Aliases, ", "))
	}
	for _, section := range sections(cmd) {
		fmt.Fprintf(out, "\n%s\n", section.title)
		for _, c := range section.commands {
			fmt.Fprintf(out, "  %-16s %s\n", c.Name(), c.Short)
		}
	}
	if cmd.Example != "" {
		fmt.Fprintf(out, "\nExamples:\n  %s\n", strings.ReplaceAll(cmd.Example, "\n", "\n  "))
	}
	if own := cmd.LocalNonPersistentFlags(); own.HasAvailableFlags() {
		fmt.Fprintf(out, "\nFlags:\n%s", own.FlagUsagesWrapped(columns))
	}
	if !cmd.HasParent() {
		fmt.Fprintf(out, "\nFlags of the daemon and of all commands:\n%s", cmd.PersistentFlags().FlagUsagesWrapped(columns))
		return nil
	}
	var global []string
	cmd.InheritedFlags().VisitAll(func(f *pflag.Flag) { global = append(global, "--"+f.Name) })
	fmt.Fprintf(out, "\nFlags of all commands, see minicri --help:\n  %s\n", strings.Join(global, " "))
	return nil
}

// columns is the width of the help on any terminal.
const columns = 100

type section struct {
	title    string
	commands []*cobra.Command
}

// sections returns the available commands below cmd by their groups.
func sections(cmd *cobra.Command) (all []section) {
	titles := []string{}
	for _, g := range cmd.Groups() {
		titles = append(titles, g.ID)
	}
	if len(titles) == 0 {
		titles = []string{""}
	}
	for _, id := range titles {
		s := section{title: id + ":"}
		if id == "" {
			s.title = "Commands:"
		}
		for _, c := range cmd.Commands() {
			if c.GroupID == id && (c.IsAvailableCommand() || c.Name() == "help") { // cobra calls help not available
				s.commands = append(s.commands, c)
			}
		}
		if len(s.commands) > 0 {
			all = append(all, s)
		}
	}
	return all
}

// Commands returns all visible commands of a tree that do something, in the order of the help.
func Commands(cmd *cobra.Command) (all []*cobra.Command) {
	for _, s := range sections(cmd) {
		for _, c := range s.commands {
			if c.HasSubCommands() {
				all = append(all, Commands(c)...)
				continue
			}
			all = append(all, c)
		}
	}
	return all
}

// Line returns a command as it is typed: "config check [FILE]".
func Line(cmd *cobra.Command) string {
	_, arguments, _ := strings.Cut(cmd.Use, " ")
	return strings.TrimSpace(strings.TrimPrefix(cmd.CommandPath(), "minicri ") + " " + arguments)
}

// Flags returns the flags of a command itself.
func Flags(cmd *cobra.Command) (flags []*pflag.Flag) {
	cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" {
			flags = append(flags, f)
		}
	})
	return slices.Clip(flags)
}

// Typed returns a flag as it is typed, with its letter and its value: "-n, --namespace NAMESPACE".
func Typed(f *pflag.Flag) string {
	value, _ := pflag.UnquoteUsage(f)
	text := "--" + f.Name
	if f.Shorthand != "" {
		text = "-" + f.Shorthand + ", " + text
	}
	return strings.TrimSpace(text + " " + value)
}

func sentence(text string) string { return strings.ToUpper(text[:1]) + text[1:] + "." }
