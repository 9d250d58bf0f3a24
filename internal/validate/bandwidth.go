package validate

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// The annotations of the bandwidth capability, as the kubelet has them.
const (
	IngressBandwidth = "kubernetes.io/ingress-bandwidth"
	EgressBandwidth  = "kubernetes.io/egress-bandwidth"
)

func (c *pod) bandwidth() {
	for _, name := range []string{IngressBandwidth, EgressBandwidth} {
		value := c.config.GetAnnotations()[name]
		if value == "" {
			continue
		}
		// The bounds are the kubelet's: 1k to 1P.
		if rate, err := BitsPerSecond(value); err != nil || rate < 1e3 || rate > 1e15 {
			c.bad("config.annotations["+name+"]", "%q is not a rate between 1k and 1P bits per second", value)
		}
	}
}

// BitsPerSecond reads a quantity as Kubernetes writes it: a number with one of
// the suffixes k, M, G, T, P (powers of 1000) or Ki, Mi, Gi, Ti, Pi (of 1024).
func BitsPerSecond(text string) (uint64, error) {
	digits := strings.TrimRight(text, "kKMGTPi")
	factor, known := map[string]float64{
		"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
		"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50,
	}[text[len(digits):]]
	number, err := strconv.ParseFloat(digits, 64)
	if err != nil || !known || number < 0 || math.IsInf(number, 0) || math.IsNaN(number) || number*factor > math.MaxInt64 {
		return 0, fmt.Errorf("%q is not a quantity", text)
	}
	return uint64(number * factor), nil
}
