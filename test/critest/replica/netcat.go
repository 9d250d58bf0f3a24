package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// netcat is busybox's nc, which on Debian has no -u, -t and -v, and with one of
// these what is needed of it: what comes from the standard input is sent to HOST
// PORT, the last arguments, and answers are printed until the server ends the
// connection or is silent for the time of -w.
func netcat(arguments []string) error {
	flags := arguments[1:max(1, len(arguments)-2)]
	ours := slices.ContainsFunc(flags, func(flag string) bool { return flag == "-u" || flag == "-t" || flag == "-v" })
	if !ours {
		return syscall.Exec("/bin/busybox", arguments, os.Environ())
	}
	network, wait := "tcp", time.Second
	for i, flag := range flags {
		switch {
		case flag == "-u":
			network = "udp"
		case flag == "-w" && i+1 < len(flags):
			seconds, err := strconv.Atoi(flags[i+1])
			if err != nil {
				return err
			}
			wait = time.Duration(seconds) * time.Second
		case strings.HasPrefix(flag, "-") && flag != "-t" && flag != "-v":
			return fmt.Errorf("%s is not one of -t, -u, -v and -w", flag)
		}
	}
	address := net.JoinHostPort(arguments[len(arguments)-2], arguments[len(arguments)-1])
	connection, err := net.DialTimeout(network, address, wait)
	if err != nil {
		return err
	}
	defer connection.Close()
	if _, err := io.Copy(connection, os.Stdin); err != nil {
		return err
	}
	return printAnswers(connection, wait)
}

func printAnswers(connection net.Conn, wait time.Duration) error {
	answer := make([]byte, 64<<10)
	for {
		if err := connection.SetReadDeadline(time.Now().Add(wait)); err != nil {
			return err
		}
		n, err := connection.Read(answer)
		if _, err := os.Stdout.Write(answer[:n]); err != nil {
			return err
		}
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
