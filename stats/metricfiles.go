package stats

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"strconv"
	"strings"
	"time"
)

// userHZ is the unit of cpuacct.stat, the same on every architecture that Go
// runs on (time(7)).
const userHZ = 100

func (m *metrics) addCPU(h hierarchies, path string, r *reader) {
	var user, system, periods, throttled, held uint64
	unit, mode := time.Microsecond, time.Microsecond
	if version2(h.cpuacct) {
		r.table(dir(h.unified, path), "cpu.stat", map[string]*uint64{
			"user_usec": &user, "system_usec": &system,
			"nr_periods": &periods, "nr_throttled": &throttled, "throttled_usec": &held,
		})
	} else {
		unit, mode = time.Nanosecond, time.Second/userHZ
		r.table(dir(h.cpuacct, path), "cpuacct.stat", map[string]*uint64{"user": &user, "system": &system})
		r.table(dir(h.cpu, path), "cpu.stat", map[string]*uint64{
			"nr_periods": &periods, "nr_throttled": &throttled, "throttled_time": &held,
		})
	}
	m.add("container_cpu_user_seconds_total", seconds(time.Duration(user)*mode))
	m.add("container_cpu_system_seconds_total", seconds(time.Duration(system)*mode))
	m.add("container_cpu_cfs_periods_total", periods)
	m.add("container_cpu_cfs_throttled_periods_total", throttled)
	m.add("container_cpu_cfs_throttled_seconds_total", seconds(time.Duration(held)*unit))
}

func (m *metrics) addMemory(h hierarchies, path string, r *reader) {
	var cache, mapped, kernel, most, failed, killed uint64
	if version2(h.memory) {
		directory := dir(h.unified, path)
		r.table(directory, "memory.stat", map[string]*uint64{"file": &cache, "file_mapped": &mapped, "kernel": &kernel})
		r.table(directory, "memory.events", map[string]*uint64{"max": &failed, "oom_kill": &killed})
		most, _ = r.number(directory, "memory.peak")
	} else {
		directory := dir(h.memory, path)
		r.table(directory, "memory.stat", map[string]*uint64{"total_cache": &cache, "total_mapped_file": &mapped})
		r.table(directory, "memory.oom_control", map[string]*uint64{"oom_kill": &killed})
		kernel, _ = r.number(directory, "memory.kmem.usage_in_bytes")
		most, _ = r.number(directory, "memory.max_usage_in_bytes")
		failed, _ = r.number(directory, "memory.failcnt")
	}
	m.add("container_memory_cache", cache)
	m.add("container_memory_mapped_file", mapped)
	m.add("container_memory_kernel_usage", kernel)
	m.add("container_memory_max_usage_bytes", most)
	m.add("container_memory_failcnt", failed)
	m.add("container_oom_events_total", killed)
}

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
	var files, sockets uint64
	for _, pid := range pids {
		f, s := openFiles(pid)
		files, sockets = files+f, sockets+s
	}
	m.add("container_processes", uint64(len(pids)))
	m.add("container_file_descriptors", files)
	m.add("container_sockets", sockets)
}

// openFiles counts those of a process; one that has gone has none.
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

// transfers are what went from and to one device.
type transfers struct{ readBytes, writtenBytes, reads, writes uint64 }

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
		m.add("container_blkio_device_usage_total", done.readBytes, name, major, minor, "Read")
		m.add("container_blkio_device_usage_total", done.writtenBytes, name, major, minor, "Write")
		m.add("container_fs_reads_bytes_total", done.readBytes, name)
		m.add("container_fs_reads_total", done.reads, name)
		m.add("container_fs_writes_bytes_total", done.writtenBytes, name)
		m.add("container_fs_writes_total", done.writes, name)
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
	if err != nil && r.err == nil {
		r.err = fmt.Errorf("read %s/%s: %w", dir, name, err)
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
