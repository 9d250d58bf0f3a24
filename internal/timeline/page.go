package timeline

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"html"
	"io"
	"strings"
	"time"
)

// The daemon has no template engine, which would cost it 3 MB: the page is
// written piece by piece, and everything that is not ours goes through escape.
//
//go:embed page.css
var pageStyle string

func escape(text string) string { return html.EscapeString(text) }

// Page writes the life of a pod as one HTML page that needs nothing else: to be
// read in a browser, and to be attached to a bug report. version is minicri's.
func (p *Pod) Page(w io.Writer, version string, now time.Time) error {
	var b strings.Builder
	fmt.Fprintf(&b, "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"+
		"<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"+
		"<title>%s: %s</title>\n<style>\n%s</style>\n</head>\n<body>\n", escape(p.Name), escape(p.State), pageStyle)
	p.pageHead(&b)
	p.pageProblems(&b)
	b.WriteString("<section id=\"waterfall\">\n<h2>Life</h2>\n")
	for i, e := range p.episodes() {
		e.page(&b, i)
	}
	b.WriteString("</section>\n")
	if p.Network != nil {
		p.Network.page(&b)
	}
	fmt.Fprintf(&b, "<footer>minicri %s, %s. Environments, secrets and credentials are left out.</footer>\n</body>\n</html>\n",
		escape(version), now.UTC().Format(time.RFC3339))
	_, err := io.WriteString(w, b.String())
	return err
}

func (p *Pod) pageHead(b *strings.Builder) {
	class := map[string]string{Ready: "ready", Failed: "failed"}[p.State]
	fmt.Fprintf(b, "<header>\n<h1>%s %s <span class=\"state %s\">%s</span></h1>\n<dl>\n", escape(p.Kind), escape(p.Name), class, escape(p.State))
	term := func(name, value string) {
		if value != "" {
			fmt.Fprintf(b, "<dt>%s</dt><dd class=\"mono\">%s</dd>\n", name, escape(value))
		}
	}
	term("id", p.ID)
	if p.Attempt > 0 {
		term("attempt", fmt.Sprint(p.Attempt))
	}
	if !p.Begin.IsZero() {
		term("began", p.Begin.UTC().Format("2006-01-02 15:04:05.000 UTC"))
		term(map[bool]string{true: "failed after", false: "made in"}[p.State == Failed], short(p.Took))
	}
	term("addresses", strings.Join(p.Addresses, ", "))
	for _, c := range p.Containers {
		term("container", strings.TrimSuffix(c.Name+" "+shorten(c.ID, 13)+": "+c.State+", "+c.Image, ", "))
	}
	b.WriteString("</dl>\n</header>\n")
}

func (p *Pod) pageProblems(b *strings.Builder) {
	for _, problem := range p.Problems() {
		head := problem.Of + " failed"
		if problem.Step != "" {
			head += " at " + problem.Step
		}
		fmt.Fprintf(b, "<section class=\"problem\">\n<h3>%s</h3>\n<p>%s</p>\n", escape(head), escape(problem.Text))
		if len(problem.Undone) > 0 {
			fmt.Fprintf(b, "<p>Undone: %s</p>\n", escape(strings.Join(problem.Undone, ", ")))
		}
		for _, text := range problem.NotUndone {
			fmt.Fprintf(b, "<p>Not undone: %s</p>\n", escape(text))
		}
		b.WriteString("</section>\n")
	}
}

func (e *episode) page(b *strings.Builder, number int) {
	fmt.Fprintf(b, "<h3>%s, %s</h3>\n<table class=\"fall\">\n<thead><tr><th class=\"num\">start</th><th class=\"num\">took</th><th>step</th><th>0 to %s</th></tr></thead>\n<tbody>\n",
		e.begin.UTC().Format("2006-01-02 15:04:05.000 UTC"), map[bool]string{true: "the beginning", false: "later"}[number == 0], short(e.took()))
	for _, l := range e.lines() {
		e.pageLine(b, l)
	}
	b.WriteString("</tbody>\n</table>\n")
	if slowest := e.slowest(); slowest != "" {
		fmt.Fprintf(b, "<p class=\"slowest\">slowest: %s</p>\n", escape(slowest))
	}
}

func (e *episode) pageLine(b *strings.Builder, l *line) {
	const scale = 10000 // hundredths of a percent
	begin, length := e.place(l, scale)
	mark, class := "<span class=\"ok\">✓</span>", l.Kind
	if l.failed() {
		mark, class = "<span class=\"bad\">✗</span>", class+" failed"
	}
	fmt.Fprintf(b, "<tr><td class=\"num\">%s</td><td class=\"num\">%s</td><td class=\"step\" style=\"padding-left:%.1frem\">%s %s</td>"+
		"<td class=\"scale\"><span class=\"bar %s\" style=\"margin-left:%.2f%%;width:%.2f%%\"></span>",
		short(l.at().Sub(e.begin)), short(l.Took), .5+1.2*float64(l.depth), mark, escape(l.name()), escape(class), float64(begin)/100, float64(length)/100)
	for _, text := range l.details() {
		bad := ""
		if l.failed() {
			bad = " bad"
		}
		fmt.Fprintf(b, "<div class=\"detail%s\">%s</div>", bad, escape(text))
	}
	b.WriteString("</td></tr>\n")
}

func (n *Network) page(b *strings.Builder) {
	b.WriteString("<section id=\"network\">\n<h2>Network " + escape(n.Name) + "</h2>\n")
	if n.Now != nil {
		n.Now.page(b)
	}
	document(b, "Configuration, as the plugins were given it", n.Config)
	document(b, "Result of ADD", n.Result)
	b.WriteString("</section>\n")
}

func (n *Now) page(b *strings.Builder) {
	b.WriteString("<h3>As it is now</h3>\n")
	if n.Problem != "" {
		fmt.Fprintf(b, "<p class=\"problem\">%s</p>\n", escape(n.Problem))
	}
	if len(n.Interfaces) > 0 {
		b.WriteString("<table id=\"interfaces\">\n<thead><tr><th>interface</th><th>state</th><th>MTU</th><th>MAC</th><th>addresses</th><th>on the node</th></tr></thead>\n<tbody>\n")
		for _, i := range n.Interfaces {
			fmt.Fprintf(b, "<tr><td class=\"mono\">%s</td><td>%s</td><td>%d</td><td class=\"mono\">%s</td><td class=\"mono\">%s</td><td class=\"mono\">%s</td></tr>\n",
				escape(i.Name), map[bool]string{true: "up", false: "down"}[i.Up], i.MTU, escape(i.MAC), escape(strings.Join(i.Addresses, ", ")), escape(i.Peer))
		}
		b.WriteString("</tbody>\n</table>\n")
	}
	for _, list := range []struct {
		name, id string
		lines    []string
	}{{"Routes", "routes", n.Routes}, {"Rules of the node's packet filter", "rules", n.Rules}} {
		if len(list.lines) > 0 {
			fmt.Fprintf(b, "<h3>%s</h3>\n<pre id=\"%s\">%s</pre>\n", list.name, list.id, escape(strings.Join(list.lines, "\n")))
		}
	}
}

func document(b *strings.Builder, head string, raw json.RawMessage) {
	if len(raw) == 0 {
		return
	}
	var pretty bytes.Buffer
	if json.Indent(&pretty, raw, "", "  ") != nil {
		pretty.Write(raw)
	}
	fmt.Fprintf(b, "<h3>%s</h3>\n<pre>%s</pre>\n", head, escape(pretty.String()))
}
