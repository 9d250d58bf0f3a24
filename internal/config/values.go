package config

import (
	"cmp"
	"net"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/distribution/reference"
	"github.com/docker/go-units"
)

// checkTags checks each field by its tags, the fields of tables too.
func (p *problems) checkTags(table reflect.Value, prefix string) {
	for i := range table.NumField() {
		field := table.Type().Field(i)
		key := prefix + field.Tag.Get("toml")
		switch value := table.Field(i).Interface().(type) {
		case Duration:
			p.checkDuration(key, value, field.Tag)
		case int:
			p.checkNumber(key, int64(value), field.Tag)
		case int64:
			p.checkNumber(key, value, field.Tag)
		case string:
			p.checkText(key, value, field.Tag.Get("need"))
		case []string:
			for _, text := range value {
				p.checkText(key, text, field.Tag.Get("need"))
			}
			p.checkNames(key, value, field.Tag.Get("need"))
		default:
			if field.Type.Kind() == reflect.Struct {
				p.checkTags(table.Field(i), key+".")
			}
		}
	}
}

// shortest is less than any duration can be meant. TOML lets a number without
// a unit through as nanoseconds; this refuses it.
const shortest = Duration(time.Millisecond)

func (p *problems) checkDuration(key string, value Duration, tag reflect.StructTag) {
	zero, zeroAllowed := tag.Lookup("zero")
	switch {
	case value >= shortest, value == 0 && zeroAllowed:
	case zeroAllowed:
		p.add(key, "%v is too short: write a duration with its unit, as in '5s', or '0s' for %s", time.Duration(value), zero)
	default:
		p.add(key, "%v is too short: write a duration with its unit, as in '5s'", time.Duration(value))
	}
}

func (p *problems) checkNumber(key string, value int64, tag reflect.StructTag) {
	least, err := strconv.ParseInt(tag.Get("least"), 10, 64)
	if err == nil && value < least {
		p.add(key, "%d is less than %d", value, least)
	}
	most, err := strconv.ParseInt(tag.Get("most"), 10, 64)
	if err == nil && value > most {
		p.add(key, "%d is more than %d", value, most)
	}
}

// checkNames refuses two values of one name, of which one would be without effect.
func (p *problems) checkNames(key string, values []string, need string) {
	if need != "ulimit" && need != "pair" && need != "sysctl" {
		return
	}
	seen := map[string]bool{}
	for _, text := range values {
		name, _, _ := strings.Cut(text, "=")
		if seen[name] {
			p.add(key, "%q is named twice", name)
		}
		seen[name] = true
	}
}

// sysctlName is a path below /proc/sys in either form of sysctl.d(5).
var sysctlName = regexp.MustCompile(`^[^\s./]+([./][^\s./]+)+$`)

// checkText checks a text by its need tag.
func (p *problems) checkText(key, text, need string) {
	need, optional := strings.CutSuffix(need, "?")
	if text == "" && optional {
		return
	}
	if strings.ContainsRune(text, 0) { // no system call could pass it on
		p.add(key, "%q contains a NUL", text)
		return
	}
	switch need {
	case "path":
		p.checkPath(key, text)
	case "paths":
		for _, path := range filepath.SplitList(cmp.Or(text, ":")) {
			p.checkPath(key, path)
		}
	case "endpoint":
		p.checkEndpoint(key, text)
	case "ulimit":
		if _, err := units.ParseUlimit(text); err != nil {
			p.add(key, "%v: write it as in 'nofile=1024:524288'", err)
		}
	case "pair":
		if name, _, found := strings.Cut(text, "="); !found || name == "" {
			p.add(key, "%q is not a name and a value with '=' between them", text)
		}
	case "sysctl":
		if name, _, found := strings.Cut(text, "="); !found || !sysctlName.MatchString(name) {
			p.add(key, "%q is not the name of a kernel parameter and its value: write it as in 'net.ipv4.tcp_syncookies=1'", text)
		}
	case "pattern":
		if _, err := path.Match(text, ""); err != nil || text == "" {
			p.add(key, "%q is not a pattern as path.Match of Go has it", text)
		}
	case "reference":
		if _, err := reference.ParseDockerRef(text); err != nil {
			p.add(key, "%q is no image reference: %v", text, err)
		}
	}
}

func (p *problems) checkPath(key, path string) {
	if !filepath.IsAbs(path) {
		p.add(key, "%q is not an absolute path", path)
	}
}

func (p *problems) checkEndpoint(key, address string) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		p.add(key, "%v: write it as in '127.0.0.1:9440'", err)
	} else if _, err := net.LookupPort("tcp", port); err != nil {
		p.add(key, "%q has no valid port: write it as in '127.0.0.1:9440'", address)
	}
}
