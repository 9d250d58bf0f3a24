package harness

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/leak"
)

// from is by which lines of tests one came to a check, where they are several: functions of tests that check need
// no t.Helper.
func from() string {
	var lines []string
	pcs, others := make([]uintptr, 64), false
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	for f, more := frames.Next(); more; f, more = frames.Next() {
		name := filepath.Base(f.File)
		switch {
		case strings.HasSuffix(name, "_test.go"):
			lines = append(lines, fmt.Sprint(name, ":", f.Line))
		case name != "expect.go" && !strings.HasPrefix(f.Function, "testing."):
			others = true
		}
	}
	if len(lines) < 2 && !others {
		return ""
	}
	return " (by " + strings.Join(lines, ", ") + ")"
}

// Check ends the test with the error, if there is one.
func Check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%v%s", err, from())
	}
}

// Same fails the test, which goes on, unless two values are the same.
func Same[T any](t testing.TB, what string, got, want T) {
	t.Helper()
	if !same(got, want) {
		t.Errorf("%s: want %q, got %q: %#v%s", what, fmt.Sprint(want), fmt.Sprint(got), got, from())
	}
}

// same compares messages by what they say. No list and an empty one are the same; the lists [] and [""],
// which print alike, are not.
func same(got, want any) bool {
	if message, is := got.(proto.Message); is {
		other, _ := want.(proto.Message)
		return proto.Equal(message, other)
	}
	if g, w := reflect.ValueOf(got), reflect.ValueOf(want); g.Kind() == reflect.Slice && g.Len()+w.Len() == 0 {
		return true
	}
	return reflect.DeepEqual(got, want)
}

// Want fails the test, which goes on, unless what it expects holds.
func Want(t testing.TB, holds bool, format string, args ...any) {
	t.Helper()
	if !holds {
		t.Errorf("%s%s", fmt.Sprintf(format, args...), from())
	}
}

// Need ends the test unless what it expects holds.
func Need(t testing.TB, holds bool, format string, args ...any) {
	t.Helper()
	if !holds {
		t.Fatalf("%s%s", fmt.Sprintf(format, args...), from())
	}
}

// Read is what a file has.
func Read(t testing.TB, path string) []byte {
	t.Helper()
	content, err := os.ReadFile(path)
	Check(t, err)
	return content
}

// Glob are the paths that match a pattern, joined of parts.
func Glob(t testing.TB, parts ...string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(parts...))
	Check(t, err)
	return found
}

// WantError fails the test, which goes on, unless there is an error that says all this.
func WantError(t testing.TB, err error, says ...string) {
	t.Helper()
	Want(t, err != nil && !slices.ContainsFunc(says, func(text string) bool { return !strings.Contains(err.Error(), text) }),
		"want an error that says %q, got: %.2000v", says, err)
}

// WantCode fails the test, which goes on, unless the error has the gRPC code, and says all this.
func WantCode(t testing.TB, err error, code codes.Code, says ...string) {
	t.Helper()
	Want(t, status.Code(err) == code, "want code %v, got: %.2000v", code, err)
	if code != codes.OK {
		WantError(t, err, says...)
	}
}

// Limited is a context for calls of a test. It ends with the test, or when Eventually would give up. It is no
// child of the test's own context, so that cleanups may use it.
func Limited(t testing.TB) context.Context {
	ctx, cancel := context.WithDeadline(context.Background(), deadline(t))
	t.Cleanup(cancel)
	return ctx
}

// deadline is the test's own time-out (go test -timeout), less a tenth for the message and the cleanups. No test has
// another bound: a busy machine makes a test slow, and a slow test has not failed.
func deadline(t testing.TB) time.Time {
	if d, ok := t.(interface{ Deadline() (time.Time, bool) }); ok {
		if end, ok := d.Deadline(); ok {
			return time.Now().Add(time.Until(end) * 9 / 10)
		}
	}
	return time.Now().Add(24 * time.Hour)
}

// Call calls an RPC that has to succeed.
func Call[Request, Answer any](t testing.TB, rpc func(context.Context, Request, ...grpc.CallOption) (Answer, error), request Request) Answer {
	t.Helper()
	answer, err := rpc(Limited(t), request)
	Check(t, err)
	return answer
}

// Err is the error of an RPC.
func Err[Request, Answer any](t testing.TB, rpc func(context.Context, Request, ...grpc.CallOption) (Answer, error), request Request) error {
	_, err := rpc(Limited(t), request)
	return err
}

// pollInterval is how often Eventually asks.
const pollInterval = 5 * time.Millisecond

// Eventually polls until the condition holds, and ends the test if it does not before the test's own time-out.
func Eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := deadline(t); !holds(); time.Sleep(pollInterval) {
		if time.Now().After(end) {
			t.Fatalf("it did not become true that %s%s", what, from())
		}
	}
}

// Info decodes one key of the verbose Status; a list is in an object there.
func Info[T any](t testing.TB, n *Node, key string) (value T) {
	t.Helper()
	said := []byte(Call(t, n.Runtime.Status, &runtimeapi.StatusRequest{Verbose: true}).Info[key])
	var list struct{ Items json.RawMessage }
	if json.Unmarshal(said, &list) == nil && list.Items != nil {
		said = list.Items
	}
	if len(said) > 0 {
		Check(t, json.Unmarshal(said, &value))
	}
	return value
}

// AllSteps fails the test if a source file names a step that the lists, by operation, lack.
func AllSteps[S ~string](t testing.TB, file string, lists map[string][]S) {
	t.Helper()
	named := regexp.MustCompile(`step\.Name = "([^"]+)"`).FindAllSubmatch(Read(t, file), -1)
	Need(t, len(named) > 0, "%s names no steps", file)
	for _, one := range named {
		listed := slices.ContainsFunc(slices.Collect(maps.Values(lists)), func(list []S) bool {
			return slices.Contains(list, S(one[1]))
		})
		Want(t, listed, "the step %s of %s is in no list", one[1], file)
	}
}

// DeadMount is a mount whose server never answers: a FUSE filesystem (fuse(4)) whose requests no one reads,
// until the test ends.
func DeadMount(t testing.TB) (dir string) {
	t.Helper()
	dir = t.TempDir()
	server, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	Check(t, err)
	Check(t, unix.Mount("dead", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server.Fd())))
	t.Cleanup(func() {
		Check(t, server.Close()) // processes that wait get an error
		Check(t, unix.Unmount(dir, unix.MNT_DETACH))
	})
	return dir
}

// StuckMount is a DeadMount whose server has read the requests: who waits for an answer sleeps uninterruptibly.
// asked is closed when somebody does.
func StuckMount(t testing.TB) (dir string, asked <-chan struct{}) {
	t.Helper()
	dir = t.TempDir()
	server, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	Check(t, err)
	Check(t, unix.Mount("stuck", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server)))
	var done sync.WaitGroup
	t.Cleanup(func() {
		_ = unix.Unmount(dir, unix.MNT_FORCE) // processes that wait get an error, as the server does; it is busy
		done.Wait()
		Check(t, errors.Join(unix.Close(server), unix.Unmount(dir, unix.MNT_DETACH)))
	})
	request := make([]byte, 1<<17)
	_, err = unix.Read(server, request)
	Check(t, err)
	// struct fuse_out_header and fuse_init_out of version 7.31 (include/uapi/linux/fuse.h) answer FUSE_INIT.
	answer := make([]byte, 80)
	binary.NativeEndian.PutUint32(answer, uint32(len(answer)))
	copy(answer[8:16], request[8:16]) // the request's id
	binary.NativeEndian.PutUint32(answer[16:], 7)
	binary.NativeEndian.PutUint32(answer[20:], 31)
	_, err = unix.Write(server, answer)
	Check(t, err)
	first := make(chan struct{})
	done.Go(func() {
		ask := sync.OnceFunc(func() { close(first) })
		for err == nil || errors.Is(err, unix.EINTR) {
			if _, err = unix.Read(server, request); err == nil {
				ask()
			}
		}
	})
	return dir, first
}

// Disk mounts a file system of its own on a directory. While it is frozen who writes there sleeps, uninterruptibly.
func Disk(t testing.TB, dir string) (freeze func() (thaw func())) {
	t.Helper()
	run := func(name string, args ...string) {
		t.Helper()
		if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s %q: %v: %s", name, args, err, out)
		}
	}
	file := filepath.Join(t.TempDir(), "disk")
	run("truncate", "-s", "64M", file)
	run("mkfs.ext4", "-q", file)
	run("mount", "-o", "loop", file, dir)
	t.Cleanup(func() { run("umount", "--lazy", dir) }) // a child of a parallel test has, until it executes, what is open here
	return func() (thaw func()) {
		run("fsfreeze", "--freeze", dir)
		thaw = sync.OnceFunc(func() { run("fsfreeze", "--unfreeze", dir) })
		t.Cleanup(thaw)
		return thaw
	}
}

// Main runs the tests of a package and then looks, once for all, for what [Parallel] tests cannot tell apart:
// namespaces and processes. It returns the exit code for os.Exit.
func Main(m *testing.M) int {
	if err := SweepCgroups(); err != nil {
		fmt.Fprintln(os.Stderr, "harness: cgroups of nodes whose test was killed:", err)
	}
	scope := leak.Scope{Namespaces: []string{"net", "user"}, Executables: executables}
	before, err := leak.Take(context.Background(), scope)
	if err != nil {
		fmt.Fprintln(os.Stderr, "harness:", err)
		return 1
	}
	code := m.Run()
	ctx, cancel := context.WithTimeout(context.Background(), settleTime)
	defer cancel()
	leaks, err := leak.Settle(ctx, before, scope)
	for _, l := range leaks {
		fmt.Fprintln(os.Stderr, "harness: left behind by all tests together:", l)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "harness:", err)
	}
	if len(leaks) > 0 || err != nil {
		return 1
	}
	return code
}

// Certificate makes one for 127.0.0.1 that is its own authority and lasts so long, and its key.
func Certificate(t testing.TB, cert, key string, lasts time.Duration) (authority []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	Check(t, err)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<60))
	Check(t, err)
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "node " + serial.String()}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(lasts), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	Check(t, err)
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	Check(t, err)
	authority = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	secret = pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})
	Check(t, errors.Join(os.WriteFile(cert, authority, 0o600), os.WriteFile(key, secret, 0o600)))
	return authority
}

// Buffer may be read while it is written.
type Buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write is of io.Writer.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// Len is the length of String, which costs a copy.
func (b *Buffer) Len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Len()
}
