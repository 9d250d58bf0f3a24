// Command replica is the program in the images that critest expects: what it does depends on the name it is started
// by. As nginx or httpd-foreground it serves a page on $PORT (80), as nonewprivs it prints its effective user, as
// pause it waits. As pgrep, ipcs, nc and nmeter it does what the specs need of these.
package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// pidFile is where nginx writes its process id, which a spec reads.
const pidFile = "/var/run/nginx.pid"

func main() {
	name := filepath.Base(os.Args[0])
	var err error
	switch {
	case name == "nonewprivs":
		fmt.Printf("Effective uid: %d\n", os.Geteuid())
	case strings.HasPrefix(name, "nginx"):
		if err = writePID(); err == nil {
			err = serve()
		}
	case name == "pause":
		select {}
	case name == "nmeter": // as nmeter -d0 %3t, of which one line is read
		fmt.Println(time.Now().UTC().Format("15:04:05.000"))
	case name == "nc":
		err = netcat(os.Args)
	case name == "pgrep":
		err = pgrep(os.Args[len(os.Args)-1])
	case name == "ipcs":
		var segments []byte
		if segments, err = os.ReadFile("/proc/sysvipc/shm"); err == nil {
			_, err = os.Stdout.Write(segments)
		}
	default:
		fmt.Println("httpd: resuming normal operations") // a spec looks for httpd in the log
		err = serve()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, name+":", err)
		os.Exit(1)
	}
}

func writePID() error {
	if err := os.MkdirAll(filepath.Dir(pidFile), 0o755); err != nil {
		return err
	}
	return os.WriteFile(pidFile, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o644)
}

// pgrep prints the processes whose name contains a text.
func pgrep(text string) error {
	names, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return err
	}
	for _, path := range names {
		name, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(name), text) { // one that has ended has no name
			fmt.Println(filepath.Base(filepath.Dir(path)))
		}
	}
	return nil
}

func serve() error {
	server := &http.Server{Addr: ":" + cmp.Or(os.Getenv("PORT"), "80"), ReadHeaderTimeout: time.Minute}
	server.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "It works!") })
	return server.ListenAndServe()
}

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
