package network_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/test/fake"
	"github.com/minicri/minicri/test/harness"
)

// These tests have a node in memory, where pauses pass at once. The others of the package run real plugins.

// memory is a daemon in memory. A test uses its network.
type memory struct {
	*fake.Daemon
	t *testing.T
}

// inMemory has a test run in a bubble, on a node with changed limits.
func inMemory(t *testing.T, change func(*network.Limits), test func(t *testing.T, d *memory)) {
	synctest.Test(t, func(t *testing.T) {
		n := fake.New(t)
		if change != nil {
			change(&n.NetworkLimits)
		}
		test(t, &memory{n.Start(), t})
	})
}

// try makes a namespace and runs ADD in it. All ids with one uid are tries of one pod.
func (d *memory) try(id, uid string) error {
	harness.Check(d.t, d.Netns.Create(id))
	args := map[string]string{"K8S_POD_NAME": "web", "K8S_POD_NAMESPACE": "default", "K8S_POD_UID": uid}
	_, err := d.Networks.Attach(d.Ctx, network.Attachment{ID: id, Args: args}, d.Netns.Path(id))
	return err
}

func (d *memory) attach(ids ...string) {
	for _, id := range ids {
		harness.Check(d.t, d.try(id, id))
	}
}

func (d *memory) detach(id string) error {
	return d.Networks.Detach(d.Ctx, id, d.Networks.NamespacePath(id))
}

// undo is what sandbox.Run does after an ADD that failed.
func (d *memory) undo(id string) {
	if d.detach(id) != nil {
		d.Networks.Release(id)
	}
}

func (d *memory) again() { d.Kill(); d.Daemon = d.Start() }

// fails arms points that fail.
func (d *memory) fails(points ...string) {
	for _, point := range points {
		d.Arm(point, func() error { return errors.New(point + " fails") })
	}
}

func (d *memory) calls(verb string) (calls []fake.Call) {
	return slices.DeleteFunc(d.PluginCalls(), func(c fake.Call) bool { return c.Verb != verb })
}

// A DEL that fails is repeated in the background, over a restart too, and the log names the pod.
func TestDELThatFailsIsRepeated(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, d *memory) {
		d.attach("web")
		d.fails("last DEL")
		harness.WantError(t, d.detach("web"), "CNI DEL", "last DEL fails", "try 1", "retried in the background")
		time.Sleep(10 * time.Second)
		harness.Want(t, strings.Contains(d.Log.String(),
			`msg="CNI DEL failed again" namespace=default pod=web sandbox=web network=net`), "the log: %s", &d.Log)
		harness.Check(t, d.Netns.Remove("web"))
		d.again()
		pending := d.Networks.Pending()
		harness.Need(t, len(pending) == 1, "pending after a restart: %+v", pending)
		harness.Want(t, pending[0].Tries >= 3, "%d tries are recorded", pending[0].Tries)
		d.Disarm()
		time.Sleep(time.Minute)
		dels := d.calls("DEL")
		harness.Want(t, dels[len(dels)-1].NoNetns, "DEL has a CNI_NETNS that does not exist")
		harness.Check(t, d.detach("web"))
		harness.Same(t, "DELs after one that succeeded", len(d.calls("DEL")), len(dels))
		harness.Same(t, "left", d.Leaks(), nil)
	})
}

// A DEL that fails blocks the deletion of its pod for a number of tries of the caller, or a time. The tries of the
// background do not count.
func TestDELBlocksTheDeletion(t *testing.T) {
	for _, c := range []struct {
		name         string
		tries, calls int
		time         time.Duration
	}{{"tries", 3, 3, time.Hour}, {"time", 1000, 61, time.Hour}} {
		t.Run(c.name, func(t *testing.T) {
			limits := func(l *network.Limits) {
				l.DetachTries, l.DetachTime, l.RetryMost = c.tries, c.time, time.Second
			}
			inMemory(t, limits, func(t *testing.T, d *memory) {
				d.attach("web")
				d.fails("last DEL")
				calls := 1
				for ; d.detach("web") != nil; calls++ {
					time.Sleep(time.Minute)
				}
				harness.Same(t, "calls", calls, c.calls)
				harness.Same(t, "pending", len(d.Networks.Pending()), 1)
			})
		})
	}
}

// An attachment is given up after a number of tries and a time, over restarts, if its ADD never succeeded.
func TestGivingUp(t *testing.T) {
	for _, c := range []struct {
		name  string
		tries int
		time  time.Duration
		add   bool
		gone  bool
	}{
		{"both over", 20, time.Minute, false, true},
		{"too few tries", 1000, 0, false, false},
		{"too early", 2, 24 * time.Hour, false, false},
		{"attached", 2, 0, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			limits := func(l *network.Limits) {
				l.GiveUpTries, l.GiveUpTime, l.RetryMost = c.tries, c.time, time.Second
			}
			inMemory(t, limits, func(t *testing.T, d *memory) {
				if !c.add {
					d.fails("middle ADD")
				}
				harness.Same(t, "ADD succeeds", d.try("web", "uid") == nil, c.add)
				d.fails("last DEL")
				d.undo("web")
				for range 2 {
					d.again()
					time.Sleep(2 * time.Minute)
				}
				harness.Same(t, "given up", len(d.Networks.Pending()) == 0, c.gone)
				harness.Same(t, "in the log", strings.Contains(d.Log.String(), "an attachment is given up"), c.gone)
				harness.Same(t, "in the timeline",
					strings.Contains(d.Log.String(), `row id=web step="give up attachment"`), c.gone)
				harness.Same(t, "the namespace is removed", !d.Made("netns", "web"), c.gone)
			})
		})
	}
}

// One try is one DEL, also after a restart, for which the journal has stored the configuration.
func TestOneDELForEachTry(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, d *memory) {
		d.fails("last ADD", "last DEL")
		harness.Want(t, d.try("web", "uid") != nil, "ADD succeeded")
		d.undo("web")
		d.again()
		time.Sleep(10 * time.Second)
		tries := d.Networks.Pending()[0].Tries
		harness.Want(t, tries > 2, "%d tries", tries)
		harness.Same(t, "DELs", len(d.calls("DEL")), tries*len(fake.Chain))
	})
}

// Forty tries of a pod whose network can never work hold one namespace at most, and leave nothing in the end.
func TestWhatNeverWorkedLeavesNothing(t *testing.T) {
	limits := func(l *network.Limits) { l.GiveUpTries, l.GiveUpTime = 4, 0 }
	inMemory(t, limits, func(t *testing.T, d *memory) {
		d.fails("last ADD", "last DEL")
		for i := range 40 {
			if i == 20 {
				d.again()
			}
			id := fmt.Sprint("try", i)
			harness.Need(t, d.try(id, "uid") != nil, "ADD succeeded")
			d.undo(id)
			pinned, _ := d.Netns.IDs()
			harness.Need(t, len(pinned) <= 1, "namespaces of one pod: %q", pinned)
		}
		d.Arm("netns remove", func() error { return errors.New("it is busy") })
		time.Sleep(time.Hour)
		const stays = "the network namespace of a removed attachment stays"
		harness.Want(t, strings.Contains(d.Log.String(), stays), "the log: %s", &d.Log)
		harness.Same(t, "left", d.Leaks(), []string{"netns try39"})
	})
}

// Without ADD there is nothing to undo, and no plugin runs.
func TestWhatNeverBeganHasNoDEL(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, d *memory) {
		ran := make(chan struct{})
		d.Arm("rename attachments", func() error { close(ran); d.Die(); return nil })
		go func() { _ = d.try("web", "uid") }()
		<-ran
		synctest.Wait()
		d.Disarm()
		d.again()
		d.Networks.ReleaseUnknown(func(string) bool { return false })
		time.Sleep(time.Minute)
		harness.Same(t, "calls", len(d.PluginCalls()), 0)
	})
}

// A DEL that a changed configuration brings forward does not count: an administrator who repairs a file in several
// goes must not lose the attachment before the repair is done. The present network undoes the tries of the wrong one.
func TestCorrectedConfiguration(t *testing.T) {
	limits := func(l *network.Limits) {
		l.GiveUpTries, l.GiveUpTime, l.RetryFirst, l.RetryMost = 3, 0, time.Hour, time.Hour
	}
	inMemory(t, limits, func(t *testing.T, d *memory) {
		var right atomic.Bool
		d.fails("last ADD")
		d.Arm("last DEL", func() error {
			if right.Load() {
				return nil
			}
			return errors.New("no")
		})
		harness.Want(t, d.try("web", "uid") != nil, "ADD succeeded")
		d.undo("web")
		for edit := range 8 {
			before := len(d.calls("DEL"))
			d.Configure("10-chain.conflist", fmt.Sprintf(fake.Conflist, fmt.Sprintf(`, "edit": %d`, edit)))
			d.Networks.Reload()
			synctest.Wait()
			// The DEL with the configuration of ADD, and one with the present configuration.
			dels := d.calls("DEL")
			harness.Same(t, "DELs", len(dels)-before, 2*len(fake.Chain))
			harness.Want(t, strings.Contains(dels[len(dels)-1].Stdin, fmt.Sprintf(`"edit":%d`, edit)), "DEL got %s",
				dels[len(dels)-1].Stdin)
		}
		harness.Same(t, "tries", d.Networks.Pending()[0].Tries, 1)
		right.Store(true)
		d.Configure("10-chain.conflist", fmt.Sprintf(fake.Conflist, `, "edit": "right"`))
		d.Networks.Reload()
		synctest.Wait()
		harness.Same(t, "left", d.Leaks(), nil)
		harness.Want(t, !strings.Contains(d.Log.String(), "given up"), "it was given up")
	})
}

// DEL has the configuration, the arguments and the interface of its ADD, whatever became of the files meanwhile.
func TestDELHasTheConfigurationOfADD(t *testing.T) {
	file := func(d *memory) string { return filepath.Join(d.Dir, "net.d", "10-chain.conflist") }
	write := func(name, plugin string) func(d *memory) error {
		text := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [{"type": %q}]}`, name, plugin)
		return func(d *memory) error { return os.WriteFile(file(d), []byte(text), 0o600) }
	}
	for _, c := range []struct {
		name   string
		change func(d *memory) error
	}{
		{"another network", write("other", "last")},
		{"a plugin less", write("net", "first")},
		{"broken", func(d *memory) error { return os.WriteFile(file(d), []byte("{"), 0o600) }},
		{"no file", func(d *memory) error { return os.Remove(file(d)) }},
		{"no directory", func(d *memory) error { return os.RemoveAll(filepath.Dir(file(d))) }},
	} {
		for _, restart := range []bool{false, true} {
			t.Run(fmt.Sprint(c.name, "/restart=", restart), func(t *testing.T) {
				inMemory(t, nil, func(t *testing.T, d *memory) {
					d.attach("web")
					harness.Check(t, c.change(d))
					if restart {
						d.again()
					}
					d.Networks.Reload()
					harness.Check(t, d.detach("web"))
					adds, dels := d.calls("ADD"), d.calls("DEL")
					slices.Reverse(adds)
					harness.Need(t, len(dels) == len(adds), "%d DELs", len(dels))
					for i, del := range dels {
						harness.Same(t, "the plugin", del.Plugin, adds[i].Plugin)
						harness.Same(t, "CNI_ARGS", sortedArgs(del.Args), sortedArgs(adds[i].Args))
						harness.Same(t, "the configuration", configOf(t, del), configOf(t, adds[i]))
					}
				})
			})
		}
	}
}

// sortedArgs splits CNI_ARGS, whose order has no meaning.
func sortedArgs(args string) []string { return slices.Sorted(strings.SplitSeq(args, ";")) }

// configOf is a plugin's configuration without prevResult. libcni adds that.
func configOf(t *testing.T, c fake.Call) (config map[string]any) {
	harness.Check(t, json.Unmarshal([]byte(c.Stdin), &config))
	delete(config, "prevResult")
	return config
}

// Many pods whose DEL fails for one reason are one line of the log.
func TestOutageIsOneLine(t *testing.T) {
	limits := func(l *network.Limits) { l.RetryMost = time.Second }
	inMemory(t, limits, func(t *testing.T, d *memory) {
		d.attach("a", "b", "c", "d")
		d.fails("last DEL")
		for _, id := range []string{"a", "b", "c", "d"} {
			d.Networks.Release(id)
		}
		time.Sleep(10 * time.Second)
		harness.Want(t, len(d.calls("DEL")) > 100, "%d DELs", len(d.calls("DEL")))
		harness.Same(t, "lines of the log", strings.Count(d.Log.String(), "CNI DEL failed again"), 1)
		failures := d.Networks.Failures()[network.Failed{Network: "net", Verb: "DEL"}]
		harness.Want(t, failures >= 36, "%d failures are counted", failures)
	})
}

// DELs that hang leave room for others.
func TestHangingDELsBlockNoOther(t *testing.T) {
	inMemory(t, func(l *network.Limits) { l.Del = time.Hour }, func(t *testing.T, d *memory) {
		ids := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
		d.attach(append(ids, "web")...)
		released := make(chan struct{})
		d.Arm("last DEL", func() error { <-released; return nil })
		for _, id := range ids {
			d.Networks.Release(id)
		}
		synctest.Wait()
		harness.Same(t, "DELs that hang", len(d.calls("DEL")), len(ids))
		d.Disarm()
		d.Networks.Release("web")
		synctest.Wait()
		harness.Want(t, !d.Networks.Attached("web"), "a DEL waits for others")
		close(released)
		synctest.Wait()
		harness.Same(t, "left", d.Leaks(), nil)
	})
}

// While ADD hangs for one pod, others are attached. Only the pod's own detach waits, as long as its caller likes. ADD
// ends with its caller, whose reason is in the error.
func TestHangingADDBlocksNoOther(t *testing.T) {
	inMemory(t, func(l *network.Limits) { l.Add = time.Hour }, func(t *testing.T, d *memory) {
		hit := d.Arm("middle ADD", d.Hang)
		reason, failed := errors.New("the pod is not wanted any more"), make(chan error)
		ctx, cancel := context.WithCancelCause(d.Ctx)
		harness.Check(t, d.Netns.Create("stuck"))
		go func() {
			_, err := d.Networks.Attach(ctx, network.Attachment{ID: "stuck"}, d.Netns.Path("stuck"))
			failed <- err
		}()
		<-hit
		d.Disarm()
		d.attach("web")
		harness.Check(t, d.detach("web"))
		short, stop := context.WithTimeout(d.Ctx, time.Minute)
		defer stop()
		err := d.Networks.Detach(short, "stuck", "")
		harness.Want(t, errors.Is(err, context.DeadlineExceeded), "Detach beside an ADD that hangs: %v", err)
		harness.Same(t, "DELs", len(d.calls("DEL")), len(fake.Chain))
		cancel(reason)
		err = <-failed
		harness.Want(t, errors.Is(err, reason), "got %v, want %v", err, reason)
		harness.Check(t, d.detach("stuck"))
	})
}

// run runs pods, and returns their ids in order. Attachments without a pod do not survive a restart.
func (d *memory) run(names ...string) (ids []string) {
	for _, name := range names {
		id, err := d.Sandboxes.Run(d.Ctx, &runtimeapi.PodSandboxConfig{
			Metadata: &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "default", Uid: name},
			Linux:    &runtimeapi.LinuxPodSandboxConfig{},
		}, "")
		harness.Check(d.t, err)
		ids = append(ids, id)
	}
	return ids
}

func (d *memory) removePods(ids ...string) {
	for _, id := range ids {
		harness.Check(d.t, errors.Join(d.Sandboxes.Stop(d.Ctx, id), d.Sandboxes.Remove(d.Ctx, id)))
	}
}

func (d *memory) entry(id string) string { return filepath.Join(d.Root, "attachments", id+".json") }

// An entry that cannot be read, or that does not exist, stops no other. Its DEL has what libcni remembers of its ADD.
func TestUnreadableAttachment(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, d *memory) {
		ids := d.run("web", "spoilt", "lost")
		harness.Check(t, os.WriteFile(d.entry(ids[1]), []byte(`{"version": 1, "rec`), 0o600))
		harness.Check(t, os.Remove(d.entry(ids[2])))
		d.Configure("10-chain.conflist", `{"cniVersion": "1.0.0", "name": "another", "plugins": [{"type": "last"}]}`)
		for range 2 { // the journal contains it from then on
			d.again()
			for i, id := range ids {
				harness.Need(t, d.Networks.Attached(id), "the attachment %d is lost", i)
			}
		}
		harness.Want(t, strings.Contains(d.Log.String(), "libcni's cache"), "the log: %s", &d.Log)
		_, err := os.Stat(filepath.Join(d.Root, "attachments", "quarantine", ids[1]+".json"))
		harness.Check(t, err)
		d.removePods(ids...)
		for id, calls := range d.Calls() {
			harness.Same(t, id, calls, "ADD first, ADD middle, ADD last, DEL last, DEL middle, DEL first, ")
		}
	})
}

// A copy of an entry under another name, and one of another node, are put aside: their DEL would free the address of
// another pod. A pod whose own entry a copy has replaced keeps its DEL. DEL runs for a pod whose record does not exist.
func TestEntryThatIsNotOfThisNode(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, d *memory) {
		ids := d.run("web", "db", "unknown")
		data := string(harness.Read(t, d.entry(ids[0])))
		foreign := strings.ReplaceAll(strings.ReplaceAll(data, "minicri-cni-", "minicri-cni-other-"), ids[0], "theirs")
		for id, text := range map[string]string{"backup": data, ids[1]: data, "theirs": foreign} {
			harness.Check(t, os.WriteFile(d.entry(id), []byte(text), 0o600))
		}
		harness.Check(t, os.Remove(filepath.Join(d.Root, "sandboxes", ids[2]+".json")))
		d.again()
		time.Sleep(time.Minute)
		for i, c := range d.calls("DEL") {
			harness.Want(t, i < len(fake.Chain) && c.ID == ids[2], "DEL ran: %+v", c)
		}
		harness.Want(t, !d.Made("address", ids[2]) && !d.Made("process", ids[2]),
			"the pod without a record has left: %q", d.Leaks())
		harness.Same(t, "quarantined", len(d.Networks.Quarantined()), 3)
		d.removePods(ids[:2]...)
		// The sweep of mounts reads the mount table of the kernel.
		left := slices.DeleteFunc(d.Leaks(), func(l string) bool {
			return strings.HasPrefix(l, "mount ") || strings.HasSuffix(l, "/quarantine")
		})
		harness.Same(t, "left", left, nil)
	})
}

// An attachment whose entry cannot be written was given up by nobody: its DEL is tried again.
func TestWhatCannotBeWrittenIsNotGivenUp(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, d *memory) {
		d.attach("web")
		d.Kill()
		harness.Check(t, os.WriteFile(d.entry("web"), []byte("no JSON"), 0o600))
		d.fails("rename attachments", "last DEL")
		d.Daemon = d.Start()
		harness.WantError(t, d.detach("web"), "last DEL fails")
		_, err := os.Lstat(d.entry("web"))
		harness.Need(t, err != nil, "its entry was written: this shows nothing")
		tries := len(d.calls("DEL"))
		time.Sleep(time.Minute)
		harness.Want(t, len(d.calls("DEL")) > tries, "DEL is not tried again")
		d.Disarm()
		time.Sleep(time.Minute)
		harness.Same(t, "pending", len(d.Networks.Pending()), 0)
		harness.Want(t, !strings.Contains(d.Log.String(), "given up"), "it was given up")
	})
}
