package redact

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode"
)

func TestTextHasNoSecrets(t *testing.T) {
	for text, keeps := range map[string]string{
		"dial https://user:S3CRET@registry.example/v2: refused":                       "registry.example",
		"GET /x?token=S3CRET&scope=pull failed":                                       "scope=pull",
		"Authorization: Bearer S3CRETS3CRET":                                          "",
		`config {"password": "S3CRET S3CRET", "user": "me"}`:                          "user",
		`escaped {\"password\": \"S3CRET\"}`:                                          "escaped",
		"MYSQL_ROOT_PASSWORD=S3CRET HOME=/root":                                       "HOME=/root",
		"aws_secret_access_key = S3CRET":                                              "aws_secret",
		"-----BEGIN RSA PRIVATE KEY-----\nS3CRET\n-----END RSA PRIVATE KEY-----\nend": "end",
		"SMTP_PASS=S3CRET HOST=mail.example":                                          "mail.example",
		"psql --password S3CRET -h db.example":                                        "db.example",
		`run with --api-key "S3CRET S3CRET" now`:                                      "now",
		"GET https://s3.example/x?X-Amz-Signature=S3CRET&part=1":                      "part=1",
		"https://blob.example/x?sv=1&sig=S3CRET&se=2":                                 "se=2",
		"Set-Cookie: S3CRET; path=/":                                                  "path=/",
		"psk: S3CRET peer=10.0.0.1":                                                   "peer=10.0.0.1",
		"ENCRYPTION_KEY='S3CRET S3CRET' MODE=a":                                       "MODE=a",
		"jwt eyJhbGciOiJI.S3CRETUzI1NiJ9.abc end":                                     "end",
	} {
		got := Text(text)
		if strings.Contains(got, "S3CRET") || !strings.Contains(got, keeps) {
			t.Errorf("%q is shown as %q", text, got)
		}
	}
	for _, plain := range []string{
		"bypass=1 passthrough: on monkey=2 design=3", "plugin bridge ADD --help failed", "keyed by eth0: 10.0.0.7/24",
		"no IP addresses available in range set: 10.0.0.1-10.0.0.2 (CNI error code 11)",
	} {
		if got := Text(plain); got != plain {
			t.Errorf("%q is shown as %q", plain, got)
		}
	}
}

func TestJSONHasNoSecrets(t *testing.T) {
	got := string(JSON([]byte(`{"type":"calico","policy":{"k8s_auth_token":"S3CRET","k8s_client_key":{"deep":"S3CRET"}},
		"envs":[{"key":"A","value":"S3CRET"}],"url":"http://u:S3CRET@h/","key_file":"/etc/key","token_file":"/run/token","ipMasq":true,"list":["password=S3CRET"]}`)))
	if strings.Contains(got, "S3CRET") {
		t.Error(got)
	}
	for _, kept := range []string{`"type":"calico"`, `"token_file":"/run/token"`, `"ipMasq":true`, "@h/"} {
		if !strings.Contains(got, kept) {
			t.Errorf("%s is gone from %s", kept, got)
		}
	}
	if got := string(JSON([]byte("no json, token=S3CRET"))); strings.Contains(got, "S3CRET") || !strings.Contains(got, "no json") {
		t.Error(got)
	}
}

func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{
		"plain, grün, 日本 ✓\nnext line": "plain, grün, 日本 ✓\nnext line",
		"\x1b]0;PWNED\x07\x1b[41mred":  "?]0;PWNED??[41mred",
		"a\tb\u00a0c\rd":               "a b c d",
		"\u009b2J\u202eexe\xff\x7f":    "?2J?exe??",
	} {
		if got := Printable(text); got != want {
			t.Errorf("%q is %q, want %q", text, got, want)
		}
	}
	if got := Line("a\nb\r\n\x1bc"); got != "a b  ?c" {
		t.Errorf("%q", got)
	}
	document := []byte("{\"a\": \"\u009b\u202e\U000e0001\x7f✓\"}\n")
	var before, after map[string]string
	shown := PrintableJSON(document)
	if err := errors.Join(json.Unmarshal(document, &before), json.Unmarshal(shown, &after)); err != nil || before["a"] != after["a"] {
		t.Errorf("%s: %v", shown, err)
	}
	for _, r := range string(shown) {
		if r != '\n' && !unicode.IsPrint(r) {
			t.Errorf("%q in %s", r, shown)
		}
	}
}
