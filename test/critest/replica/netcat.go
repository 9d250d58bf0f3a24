package main

import (
	"errors"
	"flag"
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

// netcat is busybox's nc, which on Debian has no -u, -t and -v, and with one of these what is
// needed of it: what comes from the standard input is sent to HOST PORT, and answers are
// printed until the server ends the connection, or for the time of -w.
func netcat(arguments []string) error {
	flags := flag.NewFlagSet("nc", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	udp, tcp, verbose, seconds := flags.Bool("u", false, ""), flags.Bool("t", false, ""), flags.Bool("v", false, ""), flags.Int("w", 1, "")
	if err := flags.Parse(arguments[1:]); err != nil || flags.NArg() != 2 || !*udp && !*tcp && !*verbose {
		return syscall.Exec("/bin/busybox", arguments, os.Environ())
	}
	network, wait := "tcp", time.Duration(*seconds)*time.Second
	if *udp {
		network = "udp"
	}
	connection, err := net.DialTimeout(network, net.JoinHostPort(flags.Arg(0), flags.Arg(1)), wait)
	if err != nil {
		return err
	}
	defer connection.Close()
	if _, err := io.Copy(connection, os.Stdin); err != nil {
		return err
	}
	_, err = io.Copy(os.Stdout, deadline{connection, wait})
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = nil
	}
	return err
}

// deadline is a connection that may be silent for so long.
type deadline struct {
	net.Conn
	wait time.Duration
}

func (d deadline) Read(answer []byte) (int, error) {
	if err := d.SetReadDeadline(time.Now().Add(d.wait)); err != nil {
		return 0, err
	}
	return d.Conn.Read(answer)
}
