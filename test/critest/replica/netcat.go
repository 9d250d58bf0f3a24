package main

import (
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"syscall"
	"time"
)

// answerTime is how long an answer is waited for: the specs say -w 1.
const answerTime = time.Second

// netcat is busybox's nc, which on Debian has no -u, and with -u what is needed of
// it: what comes from the standard input is sent to HOST PORT, the last arguments,
// and answers are printed.
func netcat(arguments []string) error {
	if !slices.Contains(arguments, "-u") || len(arguments) < 4 {
		return syscall.Exec("/bin/busybox", arguments, os.Environ())
	}
	connection, err := net.Dial("udp", net.JoinHostPort(arguments[len(arguments)-2], arguments[len(arguments)-1]))
	if err != nil {
		return err
	}
	defer connection.Close()
	if _, err := io.Copy(connection, os.Stdin); err != nil {
		return err
	}
	if err := connection.SetReadDeadline(time.Now().Add(answerTime)); err != nil {
		return err
	}
	if _, err := io.Copy(os.Stdout, connection); !errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	return nil
}
