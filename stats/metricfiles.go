package stats

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// userHZ is the unit of cpuacct.stat, the same on every architecture that Go
// runs on (time(7)).
const userHZ = 100

func (m *metrics) addCPU(h hierarchies, path string, r *reader) {
	var user, system, periods, throttled, held uint64
	limits := map[string]*uint64{"nr_periods": &periods, "nr_throttled": &throttled}
	modes, limited := false, false
	unit, mode := time.Microsecond, time.Microsecond
	if version2(h.cpuacct) {
		limits["user_usec"], limits["system_usec"], limits["throttled_usec"] = &user, &system, &held
		limited = r.table(dir(h.unified, path), "cpu.stat", limits)
		modes = limited
	} else {
		unit, mode = time.Nanosecond, time.Second/userHZ
		limits["throttled_time"] = &held
		modes = r.table(dir(h.cpuacct, path), "cpuacct.stat", map[string]*uint64{"user": &user, "system": &system})
		limited = r.table(dir(h.cpu, path), "cpu.stat", limits)
	}
	if modes {
		m.add("container_cpu_user_seconds_total", seconds(time.Duration(user)*mode))
		m.add("container_cpu_system_seconds_total", seconds(time.Duration(system)*mode))
	}
	if limited {
		m.add("container_cpu_cfs_periods_total", periods)
		m.add("container_cpu_cfs_throttled_periods_total", throttled)
		m.add("container_cpu_cfs_throttled_seconds_total", seconds(time.Duration(held)*unit))
	}
}

// addTable adds the rows of a file, one metric each, if it can be read.
func (m *metrics) addTable(r *reader, directory, file string, names map[string]string) {
	rows := make(map[string]*uint64)
	for key := range names {
		rows[key] = new(uint64)
	}
	if !r.table(directory, file, rows) {
		return
	}
	for key, name := range names {
		m.add(name, *rows[key])
	}
}

// addNumber adds a file that is one number, if it can be read.
func (m *metrics) addNumber(r *reader, directory, file, name string, labels ...string) {
	if number, found := r.number(directory, file); found {
		m.add(name, number, labels...)
	}
}

func (m *metrics) addMemory(h hierarchies, path string, r *reader) {
	if version2(h.memory) {
		directory := dir(h.unified, path)
		m.addTable(r, directory, "memory.stat", map[string]string{
			"file": "container_memory_cache", "file_mapped": "container_memory_mapped_file", "kernel": "container_memory_kernel_usage",
		})
		m.addTable(r, directory, "memory.events", map[string]string{"max": "container_memory_failcnt", "oom_kill": "container_oom_events_total"})
		m.addNumber(r, directory, "memory.peak", "container_memory_max_usage_bytes")
		m.addNumber(r, directory, "memory.min", "container_spec_memory_reservation_limit_bytes")
		return
	}
	directory := dir(h.memory, path)
	m.addTable(r, directory, "memory.stat", map[string]string{
		"total_cache": "container_memory_cache", "total_mapped_file": "container_memory_mapped_file",
	})
	m.addTable(r, directory, "memory.oom_control", map[string]string{"oom_kill": "container_oom_events_total"})
	m.addNumber(r, directory, "memory.kmem.usage_in_bytes", "container_memory_kernel_usage")
	m.addNumber(r, directory, "memory.max_usage_in_bytes", "container_memory_max_usage_bytes")
	m.addNumber(r, directory, "memory.failcnt", "container_memory_failcnt")
	if reserved, found := r.number(directory, "memory.soft_limit_in_bytes"); found {
		if reserved >= unlimited {
			reserved = 0
		}
		m.add("container_spec_memory_reservation_limit_bytes", reserved)
	}
}

// addHugePages adds what is used of each size of pages. Version 2 keeps no
// maximum.
func (m *metrics) addHugePages(h hierarchies, path string, r *reader) {
	directory, suffix := dir(h.hugetlb, path), ".usage_in_bytes"
	if version2(h.hugetlb) {
		directory, suffix = dir(h.unified, path), ".current"
	}
	files, err := filepath.Glob(directory + "/hugetlb.*" + suffix)
	if err != nil {
		return // the pattern has no brackets; a path with some has no such files
	}
	for _, file := range files {
		name := filepath.Base(file)
		size := strings.TrimSuffix(strings.TrimPrefix(name, "hugetlb."), suffix)
		if strings.HasSuffix(size, ".rsvd") {
			continue // what is reserved, not what is used
		}
		m.addNumber(r, directory, name, "container_hugetlb_usage_bytes", size)
		m.addNumber(r, directory, "hugetlb."+size+".max_usage_in_bytes", "container_hugetlb_max_usage_bytes", size)
	}
}

// maxCounted is the most processes whose files are counted: a look at each takes
// some ten microseconds, and a container may have as many as its limit allows.
const maxCounted = 1000

func (m *metrics) addProcesses(h hierarchies, path string, r *reader) {
	hierarchy := h.pids
	if version2(hierarchy) {
		hierarchy = h.unified
	}
	directory := dir(hierarchy, path)
	if most, found := r.number(directory, "pids.max"); found {
		if most == math.MaxUint64 {
			most = 0
		}
		m.add("container_threads_max", most)
	}
	content, found := r.read(directory, "cgroup.procs")
	if !found {
		return
	}
	pids := strings.Fields(string(content))
	m.add("container_processes", uint64(len(pids)))
	if len(pids) > 0 {
		m.addUlimits(pids[0])
	}
	if len(pids) > maxCounted {
		return // a part of them would be a wrong number
	}
	var files, sockets uint64
	for _, pid := range pids {
		f, s := openFiles(pid)
		files, sockets = files+f, sockets+s
	}
	m.add("container_file_descriptors", files)
	m.add("container_sockets", sockets)
}

// addUlimits adds the soft limit of open files, the one that cAdvisor has too,
// of the container's first process. None is added for no limit: a value of the
// CRI has no number for it.
func (m *metrics) addUlimits(pid string) {
	number, err := strconv.Atoi(pid)
	if err != nil {
		return
	}
	var limit unix.Rlimit
	if err := unix.Prlimit(number, unix.RLIMIT_NOFILE, nil, &limit); err != nil || limit.Cur == unix.RLIM_INFINITY {
		return // it has ended
	}
	m.add("container_ulimits_soft", limit.Cur, "max_open_files")
}

// openFiles counts those of a process; one that has ended has none.
func openFiles(pid string) (files, sockets uint64) {
	directory := "/proc/" + pid + "/fd"
	entries, err := os.ReadDir(directory)
	if err != nil {
		return 0, 0
	}
	for _, entry := range entries {
		files++
		if target, err := os.Readlink(directory + "/" + entry.Name()); err == nil && strings.HasPrefix(target, "socket:") {
			sockets++
		}
	}
	return files, sockets
}

// transfers are what went from and to one device. On version 1 bytes and numbers
// of transfers are two files, of which one may be unreadable.
type transfers struct {
	readBytes, writtenBytes, reads, writes uint64
	hasBytes, hasNumbers                   bool
}

// addDevices adds what was read and written. Devices without a transfer have no
// row.
func (m *metrics) addDevices(h hierarchies, path string, r *reader) {
	devices := make(map[string]*transfers)
	if version2(h.blkio) {
		r.devices2(dir(h.unified, path), devices)
	} else {
		r.devices1(dir(h.blkio, path), devices)
	}
	for number, done := range devices {
		name := deviceName(number)
		major, minor, _ := strings.Cut(number, ":")
		if done.hasBytes {
			m.add("container_blkio_device_usage_total", done.readBytes, name, major, minor, "Read")
			m.add("container_blkio_device_usage_total", done.writtenBytes, name, major, minor, "Write")
			m.add("container_fs_reads_bytes_total", done.readBytes, name)
			m.add("container_fs_writes_bytes_total", done.writtenBytes, name)
		}
		if done.hasNumbers {
			m.add("container_fs_reads_total", done.reads, name)
			m.add("container_fs_writes_total", done.writes, name)
		}
	}
}

// rowOf is the row of a device, made when first asked for.
func rowOf(devices map[string]*transfers, number string) *transfers {
	if devices[number] == nil {
		devices[number] = &transfers{}
	}
	return devices[number]
}

// devices1 reads lines as "8:0 Read 4096"; the last one is "Total 4096".
func (r *reader) devices1(dir string, devices map[string]*transfers) {
	for _, name := range []string{"blkio.throttle.io_service_bytes_recursive", "blkio.throttle.io_serviced_recursive"} {
		content, found := r.read(dir, name)
		if !found {
			continue
		}
		for line := range bytes.Lines(content) {
			fields := strings.Fields(string(line))
			if len(fields) != 3 {
				continue
			}
			done := rowOf(devices, fields[0])
			row := map[string]*uint64{"Read": &done.readBytes, "Write": &done.writtenBytes}
			if strings.Contains(name, "serviced") {
				row = map[string]*uint64{"Read": &done.reads, "Write": &done.writes}
				done.hasNumbers = true
			} else {
				done.hasBytes = true
			}
			r.take(dir, name, row[fields[1]], fields[2])
		}
	}
}

// devices2 reads lines as "8:0 rbytes=4096 wbytes=0 rios=1 wios=0 dbytes=0 dios=0".
func (r *reader) devices2(dir string, devices map[string]*transfers) {
	const name = "io.stat"
	content, _ := r.read(dir, name)
	for line := range bytes.Lines(content) {
		fields := strings.Fields(string(line))
		if len(fields) < 2 {
			continue
		}
		done := rowOf(devices, fields[0])
		done.hasBytes, done.hasNumbers = true, true
		row := map[string]*uint64{"rbytes": &done.readBytes, "wbytes": &done.writtenBytes, "rios": &done.reads, "wios": &done.writes}
		for _, field := range fields[1:] {
			key, text, _ := strings.Cut(field, "=")
			r.take(dir, name, row[key], text)
		}
	}
}

// take parses a number into a variable, nil for one that is not wanted.
func (r *reader) take(dir, name string, to *uint64, text string) {
	if to == nil {
		return
	}
	number, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		r.errs = append(r.errs, fmt.Errorf("read %s/%s: %w", dir, name, err))
	}
	*to = number
}

// deviceName is "/dev/sda" for "8:0", or the number if sysfs does not know it.
func deviceName(number string) string {
	content, err := os.ReadFile("/sys/dev/block/" + number + "/uevent")
	if errors.Is(err, fs.ErrNotExist) {
		return number
	}
	for line := range strings.Lines(string(content)) {
		if name, found := strings.CutPrefix(strings.TrimSpace(line), "DEVNAME="); found {
			return "/dev/" + name
		}
	}
	return number
}
