package image

import (
	"net/http"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

func TestChallenges(t *testing.T) {
	const bearer, basic = `bearer realm="https://a/token?x=1,2",service="r r",scope="repository:a/b:pull,push"`, `basic realm="r"`
	for _, test := range []struct {
		name string
		in   []string
		want []string
	}{
		{"none", nil, nil},
		{"one", []string{`Bearer realm="https://a/token?x=1,2",service="r r",scope="repository:a/b:pull,push"`}, []string{bearer}},
		{"two in one line", []string{`Basic realm="r", Bearer realm="https://a/token?x=1,2", service="r r", scope="repository:a/b:pull,push"`}, []string{basic, bearer}},
		{"two in one line, without a space", []string{`Bearer realm="https://a/token?x=1,2",service="r r",scope="repository:a/b:pull,push",Basic realm="r"`}, []string{bearer, basic}},
		{"two lines", []string{`Basic realm="r"`, `BEARER Realm = "https://a/token?x=1,2" , service="r r" ,, scope="repository:a/b:pull,push",`}, []string{basic, bearer}},
		{"others before it", []string{`Negotiate, NTLM, Negotiate YII9=== , Digest realm="d", qop="auth", Basic realm="r"`},
			[]string{"negotiate", "ntlm", "negotiate", `digest realm="d",qop="auth"`, basic}},
		{"data of a scheme", []string{`Negotiate YIIabcd=, Basic realm="r"`}, []string{"negotiate", basic}},
		{"without quotes", []string{`Bearer realm=https://a/token,service=r`}, []string{`bearer realm="https://a/token",service="r"`}},
		{"quotes in quotes", []string{`Basic realm="a \"b\", Bearer c"`}, []string{`basic realm="a \"b\", Bearer c"`}},
		{"no end", []string{`Basic realm="r`}, []string{basic}},
		{"no parameters", []string{"Basic"}, []string{"basic"}},
		{"a token without an address", []string{`Bearer service="r"`, `Basic realm="r"`}, []string{basic}},
		{"only that", []string{`Bearer service="r"`}, []string{`bearer service="r"`}},
		{"signs", []string{`=, "x" , Basic realm="r"`}, []string{`"x"`, basic}},
	} {
		header := http.Header{"Www-Authenticate": test.in}
		harness.Same(t, test.name, challengesOf(header), test.want)
	}
}
