package minicri_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// Functions fit on a screen, and files are about one thing (CONTRIBUTING.md). Tests
// are left out: a table of cases may be long.
func TestFunctionsFitOnAScreen(t *testing.T) {
	const longestFunction, longestFile = 60, 320
	looked := 0
	for _, p := range everyPackage(t) {
		for _, name := range append(p.GoFiles, p.CgoFiles...) {
			files := token.NewFileSet()
			parsed, err := parser.ParseFile(files, filepath.Join(p.Dir, name), nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if ast.IsGenerated(parsed) || strings.HasSuffix(name, ".pb.go") {
				continue
			}
			line := func(at token.Pos) int { return files.Position(at).Line }
			if lines := files.File(parsed.Pos()).LineCount(); lines > longestFile {
				t.Errorf("%s/%s has %d lines, %d at most: what is a file of its own?", p.name(), name, lines, longestFile)
			}
			for _, declaration := range parsed.Decls {
				function, is := declaration.(*ast.FuncDecl)
				if !is {
					continue
				}
				looked++
				if lines := line(function.End()) - line(function.Pos()) + 1; lines > longestFunction {
					t.Errorf("%s/%s: %s has %d lines, %d at most: name its parts", p.name(), name, function.Name.Name, lines, longestFunction)
				}
			}
		}
	}
	if looked < 2000 {
		t.Errorf("%d functions were looked at", looked)
	}
}
