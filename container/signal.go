package container

import (
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// stopSignal is the signal that Stop sends: what the container asks for, or
// else what its image does, or else SIGTERM.
func stopSignal(asked runtimeapi.Signal, image string) uint32 {
	if asked != runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT {
		if signal, known := signalNumber(strings.TrimPrefix(asked.String(), "SIGNAL_")); known {
			return signal
		}
	}
	if signal, known := signalNumber(image); known {
		return signal
	}
	return uint32(unix.SIGTERM)
}

// The real-time signals that a program may use (signal(7), glibc's view).
const (
	firstRealTime = 34
	lastRealTime  = 64
	// mostAfterMin is up to which one the CRI counts from the first.
	mostAfterMin = 15
)

// signalNumber reads a signal's name, with or without SIG, or its number.
func signalNumber(text string) (uint32, bool) {
	if number, err := strconv.ParseUint(text, 10, 32); err == nil {
		return uint32(number), number > 0 && number <= lastRealTime
	}
	name := strings.TrimPrefix(strings.ToUpper(text), "SIG")
	switch name { // second names of a signal, which unix.SignalNum does not know
	case "CLD":
		name = "CHLD"
	case "POLL":
		name = "IO"
	case "IOT":
		name = "ABRT"
	}
	if signal := unix.SignalNum("SIG" + name); signal != 0 {
		return uint32(signal), true
	}
	return realTime(name)
}

// realTime reads RTMIN, RTMIN+n, RTMAX and RTMAX-n; the CRI writes RTMINPLUS1.
func realTime(name string) (uint32, bool) {
	name = strings.NewReplacer("PLUS", "+", "MINUS", "-").Replace(name)
	for prefix, base := range map[string]int{"RTMIN": firstRealTime, "RTMAX": lastRealTime} {
		rest, found := strings.CutPrefix(name, prefix)
		if !found {
			continue
		}
		offset := 0
		if rest != "" {
			var err error
			if offset, err = strconv.Atoi(rest); err != nil {
				return 0, false
			}
		}
		signal := base + offset
		return uint32(signal), signal >= firstRealTime && signal <= lastRealTime
	}
	return 0, false
}

// signalEnum is the CRI's name of a signal: of those that have two, the kernel's.
func signalEnum(number uint32) runtimeapi.Signal {
	name := unix.SignalName(unix.Signal(number))
	switch fromMin, toMax := int(number)-firstRealTime, lastRealTime-int(number); {
	case fromMin == 0:
		name = "SIGRTMIN"
	case toMax == 0:
		name = "SIGRTMAX"
	case fromMin > 0 && fromMin <= mostAfterMin:
		name = "SIGRTMINPLUS" + strconv.Itoa(fromMin)
	case fromMin > 0 && toMax > 0:
		name = "SIGRTMAXMINUS" + strconv.Itoa(toMax)
	}
	return runtimeapi.Signal(runtimeapi.Signal_value["SIGNAL_"+name]) // 0, the runtime's default, for none
}
