package stats

import (
	"bytes"
	"fmt"
	"strconv"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func (u *usage) readPressure(h hierarchies, path string, r *reader) {
	if h.unified == "" {
		return
	}
	unified := dir(h.unified, path)
	u.cpuPressure = r.pressure(unified, "cpu.pressure")
	if u.cpuPressure == nil {
		return // the kernel has none, or the cgroup is not here
	}
	u.memoryPressure = r.pressure(unified, "memory.pressure")
	u.ioPressure = r.pressure(unified, "io.pressure")
}

// pressure reads one file of Pressure Stall Information, nil if there is none.
// Totals are in microseconds, as the kernel has them.
//
//	some avg10=0.00 avg60=0.00 avg300=0.00 total=0
//	full avg10=0.00 avg60=0.00 avg300=0.00 total=0
func (r *reader) pressure(dir, name string) *runtimeapi.PsiStats {
	content, found := r.read(dir, name)
	if !found {
		return nil
	}
	stats := &runtimeapi.PsiStats{Some: &runtimeapi.PsiData{}, Full: &runtimeapi.PsiData{}}
	for line := range bytes.Lines(content) {
		fields := bytes.Fields(line)
		data := stats.Some
		if string(fields[0]) == "full" {
			data = stats.Full
		}
		if err := takePressure(data, fields[1:]); err != nil {
			r.errs = append(r.errs, fmt.Errorf("read %s/%s: %w", dir, name, err))
			return nil
		}
	}
	return stats
}

func takePressure(data *runtimeapi.PsiData, fields [][]byte) (err error) {
	averages := map[string]*float64{"avg10": &data.Avg10, "avg60": &data.Avg60, "avg300": &data.Avg300}
	for _, field := range fields {
		key, value, _ := bytes.Cut(field, []byte("="))
		switch average := averages[string(key)]; {
		case average != nil:
			*average, err = strconv.ParseFloat(string(value), 64)
		case string(key) == "total":
			data.Total, err = strconv.ParseUint(string(value), 10, 64)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
