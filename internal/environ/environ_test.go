package environ

import (
	"encoding/json"
	"slices"
	"testing"
)

// What is encoded survives JSON, and nothing else is touched.
func TestEncodedSurvivesJSON(t *testing.T) {
	env := []string{"A=1", "LATIN=\xe4", "EMPTY=", "ä=\xff\x00", "OWN=" + encodedPrefix + "AA==", "B=ä=b"}
	original := slices.Clone(env)
	written, err := json.Marshal(Encode(env))
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(env, original) {
		t.Errorf("Encode changed its argument to %q", env)
	}
	var read []string
	if err := json.Unmarshal(written, &read); err != nil {
		t.Fatal(err)
	}
	plain, block, err := Take(read)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"A=1", "LATIN=", "EMPTY=", "ä=", "OWN=", "B=ä=b"}; !slices.Equal(plain, want) {
		t.Errorf("plain variables %q, want %q", plain, want)
	}
	if want := "LATIN=\xe4\x00ä=\xff\x00\x00OWN=" + encodedPrefix + "AA==\x00"; string(block) != want {
		t.Errorf("block %q, want %q", block, want)
	}
}

func TestNothingToEncode(t *testing.T) {
	env := []string{"A=1", "B=ä"}
	if got := Encode(env); &got[0] != &env[0] {
		t.Error("the list was copied")
	}
	plain, block, err := Take(env)
	if err != nil || block != nil || &plain[0] != &env[0] {
		t.Errorf("%q, %q, %v", plain, block, err)
	}
}

func TestBadEncodingIsRefused(t *testing.T) {
	if _, _, err := Take([]string{"A=" + encodedPrefix + "?"}); err == nil {
		t.Error("no error")
	}
}
