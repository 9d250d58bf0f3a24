package machine

import (
	"os"
	"strconv"
	"strings"
)

// count is how many CPUs or memory nodes the kernel can have: its list, such as
// 0-3, ends with the last one (/sys/devices/system/cpu/possible). It is 0 where
// that cannot be read.
func count(file string) uint64 {
	list, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	text := strings.TrimSpace(string(list))
	last, err := strconv.ParseUint(text[strings.LastIndexAny(text, "-,")+1:], 10, 31)
	if err != nil {
		return 0
	}
	return last + 1
}
