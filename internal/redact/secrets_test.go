package redact

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html"
	"net/url"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

func TestSecretsAreHiddenInEachForm(t *testing.T) {
	const user, password = "robot$x", `Mel"lon & 47/11+ü%41`
	forms := []struct {
		name string
		form func(string) string
	}{
		{"plain", func(s string) string { return s }},
		{"query", url.QueryEscape},
		{"path", url.PathEscape},
		{"lower-case query", func(s string) string { return strings.ToLower(url.QueryEscape(s)) }},
		{"every byte", func(s string) (all string) {
			for _, b := range []byte(s) {
				all += fmt.Sprintf("%%%02x", b)
			}
			return all
		}},
		{"JSON", func(s string) string { text, _ := json.Marshal(s); return string(text) }},
		{"Go", func(s string) string { return fmt.Sprintf("%q", s) }},
		{"HTML", html.EscapeString},
		{"HTML of a query", func(s string) string { return html.EscapeString(url.QueryEscape(s)) }},
		{"query of a query", func(s string) string { return url.QueryEscape(url.QueryEscape(s)) }},
	}
	var secrets Secrets
	secrets.AddLogin(user, password)
	for _, value := range []string{
		password, user + ":" + password, base64.StdEncoding.EncodeToString([]byte(user + ":" + password)),
		base64.URLEncoding.EncodeToString([]byte(password)), base64.RawStdEncoding.EncodeToString([]byte(password)),
	} {
		for _, f := range forms {
			shown := f.form(value)
			if f.name == "lower-case query" && strings.ToLower(value) != value {
				shown = strings.NewReplacer("%2F", "%2f", "%3D", "%3d", "%2B", "%2b").Replace(url.QueryEscape(value))
			}
			got := secrets.Text("before " + shown + " after")
			rest := strings.TrimSuffix(strings.TrimPrefix(got, "before "), " after")
			left := strings.Trim(strings.ReplaceAll(rest, Hidden, ""), `"=%3dD:25x$robtX&#; `)
			harness.Want(t, strings.Contains(got, Hidden), "%s of %q: %q is shown as %q", f.name, value, shown, got)
			harness.Want(t, strings.HasSuffix(got, " after"), "%s of %q: %q is shown as %q", f.name, value, shown, got)
			harness.Want(t, left == "", "%s of %q: %q is shown as %q", f.name, value, shown, got)
		}
	}
}

// A short secret is hidden as a word alone, and an empty one not at all: the rest of the text stays readable.
func TestSecretsLeaveTheRest(t *testing.T) {
	var secrets Secrets
	harness.Same(t, "without secrets", secrets.Text("a%20b"), "a%20b")
	secrets.AddLogin("u", "pw")
	secrets.AddLogin("u", "")
	secrets.Add("", "x")
	for text, want := range map[string]string{
		"password=pw, pwd unknown": "password=(hidden), pwd unknown",
		"GET /a%20b?x=pw&y=x":      "GET /a%20b?x=(hidden)&y=x",
		"Basic dTpwdw==":           "Basic (hidden)==",
		"pw":                       "(hidden)",
		"":                         "",
	} {
		harness.Same(t, text, secrets.Text(text), want)
	}
}
