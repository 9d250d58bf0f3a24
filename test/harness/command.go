package harness

// RunCommand runs another command of the program, such as "check", with the
// node's flags and then these, in the node's network namespace, and gives back
// what it wrote to its output.
func (n *Node) RunCommand(name string, flags ...string) (output string, err error) {
	cmd := n.command()
	cmd.Args = append([]string{cmd.Args[0], name}, append(cmd.Args[1:], flags...)...)
	err = n.inNetns(func() error {
		text, err := cmd.Output()
		output = string(text)
		return err
	})
	return output, err
}
