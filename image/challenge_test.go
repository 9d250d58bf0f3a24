package image

import (
	"net/http"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

func TestChallenges(t *testing.T) {
	const token = `bearer realm="https://a/token?x=1,2",service="r r",scope="a:pull,push"`
	const basic = `basic realm="r"`
	const realm = `realm="https://a/token?x=1,2"`
	for _, test := range []struct{ name, in, want string }{ // texts end at a line's end
		{"none", "", ""},
		{"one", `Bearer ` + realm + `,service="r r",scope="a:pull,push"`, token},
		{
			"two in one", `Basic realm="r", Bearer ` + realm + `, service="r r", scope="a:pull,push"`,
			basic + "\n" + token,
		},
		{"no space", `Bearer ` + realm + `,service="r r",scope="a:pull,push",Basic realm="r"`, token + "\n" + basic},
		{
			"two fields",
			"Basic realm=\"r\"\n" + `BEARER Realm = "https://a/token?x=1,2" , service="r r" ,, scope="a:pull,push",`,
			basic + "\n" + token,
		},
		{
			"others before it", `Negotiate, NTLM, Negotiate YII9=== , Digest realm="d", qop="auth", Basic realm="r"`,
			"negotiate\nntlm\nnegotiate\ndigest realm=\"d\",qop=\"auth\"\n" + basic,
		},
		{"data of a scheme", `Negotiate YIIabcd=, Basic realm="r"`, "negotiate\n" + basic},
		{"without quotes", `Bearer realm=https://a/token,service=r`, `bearer realm="https://a/token",service="r"`},
		{"quotes in quotes", `Basic realm="a \"b\", Bearer c"`, `basic realm="a \"b\", Bearer c"`},
		{"no end", `Basic realm="r`, basic},
		{"no parameters", "Basic", "basic"},
		{"a token without an address", "Bearer service=\"r\"\nBasic realm=\"r\"", basic},
		{"only that", `Bearer service="r"`, `bearer service="r"`},
		{"signs", `=, "x" , Basic realm="r"`, "\"x\"\n" + basic},
	} {
		header := http.Header{"Www-Authenticate": strings.Split(test.in, "\n")}
		harness.Same(t, test.name, strings.Join(challengesOf(header), "\n"), test.want)
	}
}
