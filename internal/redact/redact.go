// Package redact removes secrets, and what a terminal would obey, from what is shown: configurations, and
// messages of plugins, registries and programs. It errs on the side of hiding, and keeps no state.
package redact

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf16"
)

// Hidden stands where a secret was.
const Hidden = "(hidden)"

// secret is the part of a name that says that the value is one.
const secret = `(?:password|passwd|passphrase|passkey|pwd|psk|pre[-_]?shared|secret|token|credential|cookie|signature|api[-_]?key|access[-_]?key|private[-_]?key|client[-_]?key|authorization|auth[-_]?key)`

var (
	secretName = regexp.MustCompile(`(?i)` + secret)
	// secretFile names a path, which is no secret.
	secretFile  = regexp.MustCompile(`(?i)(file|path|dir)$`)
	environment = regexp.MustCompile(`(?i)(^|_)envs?$|^DefaultEnv$|^environment$|^(identity|registry)_?token$|^auths?$|^[k-]?certificate[-_]authority[-_]data$`)

	patterns = []struct {
		find    *regexp.Regexp
		replace string
	}{
		{regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)`), Hidden},
		// A login in an address, also one with an @, and one with a slash that makes no valid address: no port.
		{regexp.MustCompile(`://[^/\s"']+@`), "://" + Hidden + "@"},
		{regexp.MustCompile(`://[^/\s"':]*:[^/\s"']*[^/\s"'\d][^/\s"']*/[^\s"']*@`), "://" + Hidden + "@"},
		{regexp.MustCompile(`eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]*)?`), Hidden},
		{regexp.MustCompile(`(?i)\b(bearer|basic) +[A-Za-z0-9+/=_.~-]{6,}`), "$1 " + Hidden},
		{regexp.MustCompile(`\b(AKIA|ASIA)[A-Z0-9]{16}\b`), Hidden},
		// A flag and its value, then short names that are also parts of other words.
		{regexp.MustCompile(`(?i)((?:^|[\s"'=,;(\[])--?[\w-]*` + secret + `[\w-]*\s+)(\\?"[^"]*"|'[^']*'|[^\s,;&"'=-][^\s,;&"']*)`), "${1}" + Hidden},
		{regexp.MustCompile(`(?i)\b((?:[\w.-]*[_.-])?(?:pass|sig|key)\\?["']?\s*=\s*)(\\?"[^"]*"|'[^']*'|[^\s,;&"']+)`), "${1}" + Hidden},
		{regexp.MustCompile(`(?i)([\w.-]*` + secret + `[\w.-]*\\?["']?\s*=\s*)(\\?"[^"]*"|'[^']*'|[^\s,;&"']+)`), "${1}" + Hidden},
	}
	// colon is a name with its value, or the end of a path or of a sentence with an error.
	colon = regexp.MustCompile(`(?i)(/?)([\w.-]*` + secret + `[\w.-]*(\\?["'])?\s*:\s*)(\\?"[^"]*"|'[^']*'|[^\s,;&"']+)`)
	// cause begins the text of an error: a status of HTTP, or a word of the kernel's, of Go's and of registries'.
	cause = regexp.MustCompile(`(?i)^([1-5]\d\d|no|not|permission|denied|access|authentication|authorization|unauthorized|forbidden|invalid|expired|` +
		`mount|open|read|write|stat|lstat|mkdir|chown|exec|fork|dial|lookup|connect|connection|context|operation|input|i/o|device|file|too|bad|is|` +
		`error|failed|failure|cannot|can't|could|unable|unexpected|unknown|unsupported|missing|required|illegal|malformed|eof|get|post|head|tls|x509|` +
		`http|https|rpc|json|yaml|toml|system|server|user|rate|resource|service|timeout|timed|the)[:.,]?$`)
)

// Text hides what looks like a secret: values of names that say so, credentials in addresses, tokens, keys.
func Text(text string) string {
	for _, p := range patterns {
		text = p.find.ReplaceAllString(text, p.replace)
	}
	var b strings.Builder
	for {
		found := colon.FindStringSubmatchIndex(text)
		if found == nil {
			return b.String() + text
		}
		path, quoted, value := found[3] > found[2], found[6] >= 0, text[found[8]:found[9]]
		b.WriteString(text[:found[8]]) // up to the value, which may be a name with a value itself
		text = text[found[8]:]
		if path || !quoted && cause.MatchString(value) {
			continue
		}
		b.WriteString(Hidden)
		text = text[len(value):]
	}
}

// JSON hides the values of secret keys, whole environments, and what Text hides. What is no JSON is a text.
func JSON(document []byte) json.RawMessage {
	if len(document) == 0 {
		return nil
	}
	var value any
	if json.Unmarshal(document, &value) != nil {
		value = Text(string(document))
	}
	clean, err := json.Marshal(each(value, Text, hides))
	if err != nil {
		return json.RawMessage(`"` + Hidden + `"`)
	}
	return clean
}

func hides(key string, value any) bool {
	switch value.(type) {
	case bool, nil:
		return false
	}
	return environment.MatchString(key) || secretName.MatchString(key) && !secretFile.MatchString(key)
}

// Printable returns a text that a terminal does not obey: a question mark replaces each character that is
// not printed, such as escape sequences and changes of the writing direction. Newlines stay.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || unicode.IsPrint(r):
			return r
		case unicode.IsSpace(r):
			return ' '
		}
		return '?'
	}, strings.ToValidUTF8(text, "?"))
}

// Line is Printable without newlines, with which a text could forge rows of a table.
func Line(text string) string { return strings.ReplaceAll(Printable(text), "\n", " ") }

// Lines applies Line to all texts in a copy of a value, which JSON must preserve.
func Lines[T any](value T) (shown T) {
	document, err := json.Marshal(value)
	var read any
	decoder := json.NewDecoder(bytes.NewReader(document))
	decoder.UseNumber()
	if err == nil && decoder.Decode(&read) == nil {
		if document, err = json.Marshal(each(read, Line, func(string, any) bool { return false })); err == nil {
			_ = json.Unmarshal(document, &shown)
		}
	}
	return shown
}

func each(value any, text func(string) string, hides func(key string, value any) bool) any {
	switch v := value.(type) {
	case string:
		return text(v)
	case []any:
		for i := range v {
			v[i] = each(v[i], text, hides)
		}
	case map[string]any:
		for key, inner := range v {
			if v[key] = Hidden; !hides(key, inner) {
				v[key] = each(inner, text, hides)
			}
		}
	}
	return value
}

// PrintableJSON escapes the characters that are not printed. The document keeps its meaning.
func PrintableJSON(document []byte) []byte {
	var b bytes.Buffer
	for _, r := range string(document) {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			b.WriteRune(r)
			continue
		}
		for _, unit := range utf16.Encode([]rune{r}) {
			fmt.Fprintf(&b, `\u%04x`, unit)
		}
	}
	return b.Bytes()
}
