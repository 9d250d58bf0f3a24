package image

import (
	"net/http"
	"slices"
	"strings"
)

// challengesOf returns the challenges of an answer, one in each text and quoted as the library reads it: a server may
// have several in one header field (RFC 9110, 11.6.1), or leave quotes out. One for a token without an address is
// dropped where there are others.
func challengesOf(header http.Header) []string {
	var all []string
	for _, line := range header.Values("WWW-Authenticate") {
		all = append(all, splitChallenges(line)...)
	}
	usable := slices.DeleteFunc(slices.Clone(all), func(one string) bool {
		return strings.HasPrefix(one, "bearer") && !strings.Contains(one, ` realm="`)
	})
	if len(usable) > 0 {
		return usable
	}
	return all
}

func splitChallenges(line string) (all []string) {
	parameters := 0 // count those that the last challenge has
	for {
		line = strings.TrimLeft(line, " \t,")
		if line == "" {
			return all
		}
		name := line[:wordEnd(line, " \t,=")]
		line = line[len(name):]
		value := strings.TrimLeft(line, " \t")
		if name != "" && len(all) > 0 && strings.HasPrefix(value, "=") { // a parameter, else a scheme
			var text string
			text, line = quoted(strings.TrimLeft(value[1:], " \t"))
			separator := ","
			if parameters++; parameters == 1 {
				separator = " "
			}
			all[len(all)-1] += separator + strings.ToLower(name) + "=" + text
			continue
		}
		if name == "" { // a sign in no place for one
			line = line[1:]
			continue
		}
		all, parameters = append(all, strings.ToLower(name)), 0
		if at := wordEnd(value, " \t,"); at < len(line) && value != line && isToken68(value[:at]) {
			line = value[at:]
		}
	}
}

// isToken68 reports whether a word is the data of a scheme such as Negotiate: it ends in its only signs of equality.
func isToken68(word string) bool {
	data := strings.TrimRight(word, "=")
	return len(data) < len(word) && data != "" && !strings.Contains(data, "=") && !strings.Contains(word, `"`)
}

// quoted reads a value, whether quoted or not, and returns it in quotes.
func quoted(line string) (text, rest string) {
	if !strings.HasPrefix(line, `"`) {
		end := wordEnd(line, " \t,")
		return `"` + strings.ReplaceAll(line[:end], `"`, `\"`) + `"`, line[end:]
	}
	for i := 1; i < len(line); i++ {
		switch line[i] {
		case '\\':
			i++
		case '"':
			return line[:i+1], line[i+1:]
		}
	}
	return line + `"`, "" // the server has forgotten it
}

func wordEnd(line, separators string) int {
	if end := strings.IndexAny(line, separators); end >= 0 {
		return end
	}
	return len(line)
}
