package redact

import (
	"encoding/base64"
	"html"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// Secrets hides the values of credentials in texts of other programs, such as an error page that repeats a request.
// It finds a value by itself, in base64, and in the escapes of URLs, JSON and HTML, two of them on top of each other.
// The zero value hides nothing. Methods are for any goroutine.
type Secrets struct {
	mu     sync.Mutex // guards values
	values []string   // the longest first
}

const (
	leastSecret = 2 // bytes: a shorter value would hide parts of every text
	leastInWord = 6 // bytes: a shorter value is hidden only where it is a word
)

// Add has values hidden from now on.
func (s *Secrets) Add(values ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, value := range values {
		if len(value) < leastSecret || slices.Contains(s.values, value) {
			continue
		}
		s.values = append(s.values, value)
		for _, encoding := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			if form := encoding.EncodeToString([]byte(value)); !slices.Contains(s.values, form) {
				s.values = append(s.values, form)
			}
		}
		if form := strings.ReplaceAll(value, " ", "+"); form != value { // a form's
			s.values = append(s.values, form)
		}
	}
	slices.SortStableFunc(s.values, func(a, b string) int { return len(b) - len(a) })
}

// AddLogin is Add for a password, also as HTTP's basic authentication has it.
func (s *Secrets) AddLogin(user, secret string) {
	if secret != "" {
		s.Add(secret, user+":"+secret)
	}
}

// Text returns a text without the values.
func (s *Secrets) Text(text string) string {
	s.mu.Lock()
	values := slices.Clone(s.values)
	s.mu.Unlock()
	if len(values) == 0 {
		return text
	}
	hidden := make([]bool, len(text)) // has an element for each byte of text
	plain := decoded{text: text, from: make([]int, len(text)+1)}
	for i := range plain.from {
		plain.from[i] = i
	}
	plain.hide(values, hidden, 2)
	var b strings.Builder
	for i := range len(text) {
		switch {
		case !hidden[i]:
			b.WriteByte(text[i])
		case i == 0 || !hidden[i-1]:
			b.WriteString(Hidden)
		}
	}
	return b.String()
}

// decoded is a text whose byte i begins at byte from[i] of the text that it was decoded from.
type decoded struct {
	text string
	from []int // one more than bytes: the last is the end
}

// hide also looks below the escapes, each kind alone: a value may have what looks like the escapes of another.
func (d decoded) hide(values []string, hidden []bool, below int) {
	for _, value := range values {
		for at := 0; ; {
			i := strings.Index(d.text[at:], value)
			if i < 0 {
				break
			}
			begin, end := at+i, at+i+len(value)
			at = begin + 1
			if len(value) < leastInWord &&
				(isWord(utf8.DecodeLastRuneInString(d.text[:begin])) || isWord(utf8.DecodeRuneInString(d.text[end:]))) {
				continue
			}
			for k := d.from[begin]; k < d.from[end]; k++ {
				hidden[k] = true
			}
		}
	}
	for _, kind := range escapes {
		if next := d.decode(kind); below > 0 && next.text != d.text {
			next.hide(values, hidden, below-1)
		}
	}
}

func isWord(r rune, size int) bool {
	return size > 0 && (r == '_' || r == '-' || unicode.IsLetter(r) || unicode.IsDigit(r))
}

var escapes = []*regexp.Regexp{
	regexp.MustCompile(`%[0-9a-fA-F]{2}`),                                    // URLs
	regexp.MustCompile(`\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\["'/\\nrtbf]`), // JSON and Go
	regexp.MustCompile(`&#?[0-9a-zA-Z]{1,31};`),                              // HTML
}

func (d decoded) decode(kind *regexp.Regexp) decoded {
	next, b, at := decoded{}, strings.Builder{}, 0
	for _, found := range kind.FindAllStringIndex(d.text, -1) {
		b.WriteString(d.text[at:found[0]])
		next.from = append(next.from, d.from[at:found[0]]...)
		plain := unescape(d.text[found[0]:found[1]])
		b.WriteString(plain)
		for range len(plain) {
			next.from = append(next.from, d.from[found[0]])
		}
		at = found[1]
	}
	b.WriteString(d.text[at:])
	next.from = append(next.from, d.from[at:]...)
	next.text = b.String()
	return next
}

func unescape(text string) string {
	switch {
	case text[0] == '&':
		return html.UnescapeString(text)
	case text[0] == '%' || text[1] == 'x' || text[1] == 'u':
		n, err := strconv.ParseUint(strings.TrimLeft(text, `%\xu`), 16, 32)
		switch {
		case err != nil: // cannot be: the pattern has digits alone
			return text
		case text[0] == '%' || text[1] == 'x':
			return string([]byte{byte(n)})
		}
		return string(rune(n))
	}
	if i := strings.IndexByte("nrtbf", text[1]); i >= 0 {
		return string("\n\r\t\b\f"[i])
	}
	return text[1:]
}
