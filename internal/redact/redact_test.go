package redact

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode"

	"github.com/minicri/minicri/test/harness"
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
		"/v2/token?password: S3CRET":                                                  "/v2/token",
		`{"auth_token": "no", "x": {"password": "S3CRET"}}`:                           "auth_token",
		"read /run/token: password: S3CRET":                                           "/run/token",
		"registry-token: S3CRET401":                                                   "registry-token",
		"jwt eyJhbGciOiJI.S3CRETUzI1NiJ9.abc end":                                     "end",
	} {
		got := Text(text)
		harness.Want(t, !strings.Contains(got, "S3CRET") && strings.Contains(got, keeps), "%q is shown as %q", text, got)
	}
	for _, plain := range []string{
		"bypass=1 passthrough: on monkey=2 design=3", "plugin bridge ADD --help failed", "keyed by eth0: 10.0.0.7/24",
		"GET http://registry.example/token: 401 Unauthorized: unauthorized: incorrect username or password: 401",
		`exec: "/etc/passwd": permission denied`, `error mounting "/tmp" to rootfs at "/etc/passwd": mount src=/tmp, dst=/etc/passwd: not a directory`,
		"open /var/run/secrets/kubernetes.io/serviceaccount/token: no such file or directory", "read /run/secrets/db-password: input/output error",
		"get the token: unexpected EOF", "fetch service-account-token from /x: context deadline exceeded", "token: Get failed",
		"create secret: forbidden: no access", "stat /etc/api-key: permission denied", "token: unauthorized",
		"no IP addresses available in range set: 10.0.0.1-10.0.0.2 (CNI error code 11)",
	} {
		harness.Same(t, "what is shown", Text(plain), plain)
	}
}

func TestJSONHasNoSecrets(t *testing.T) {
	got := string(JSON([]byte(`{"type":"calico","policy":{"k8s_auth_token":"S3CRET","k8s_client_key":{"deep":"S3CRET"}},
		"envs":[{"key":"A","value":"S3CRET"}],"url":"http://u:S3CRET@h/","key_file":"/etc/key","token_file":"/run/token","ipMasq":true,"list":["password=S3CRET"]}`)))
	harness.Want(t, !strings.Contains(got, "S3CRET"), "%v", got)
	for _, kept := range []string{`"type":"calico"`, `"token_file":"/run/token"`, `"ipMasq":true`, "@h/"} {
		harness.Want(t, strings.Contains(got, kept), "%s is gone from %s", kept, got)
	}
	got = string(JSON([]byte("no json, token=S3CRET")))
	harness.Want(t, !strings.Contains(got, "S3CRET") && strings.Contains(got, "no json"), "%v", got)
}

func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{
		"plain, grün, 日本 ✓\nnext line": "plain, grün, 日本 ✓\nnext line",
		"\x1b]0;PWNED\x07\x1b[41mred":  "?]0;PWNED??[41mred",
		"a\tb\u00a0c\rd":               "a b c d",
		"\u009b2J\u202eexe\xff\x7f":    "?2J?exe??",
	} {
		harness.Same(t, text, Printable(text), want)
	}
	got := Line("a\nb\r\n\x1bc")
	harness.Want(t, got == "a b  ?c", "%q", got)
	document := []byte("{\"a\": \"\u009b\u202e\U000e0001\x7f✓\"}\n")
	var before, after map[string]string
	shown := PrintableJSON(document)
	err := errors.Join(json.Unmarshal(document, &before), json.Unmarshal(shown, &after))
	harness.Want(t, err == nil && before["a"] == after["a"], "%s: %v", shown, err)
	for _, r := range string(shown) {
		harness.Want(t, r == '\n' || unicode.IsPrint(r), "%q in %s", r, shown)
	}
}
