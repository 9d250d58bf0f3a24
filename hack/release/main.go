// Command sbom writes the components of the programs of a release, in CycloneDX: the
// modules that are linked into each, by the programs' own build information, with the
// licences that NOTICE names, and the C libraries of the machine that it is built on.
//
//	sbom -version VERSION -arch ARCH DIRECTORY
package main

import (
	"debug/buildinfo"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"

	cyclonedx "github.com/CycloneDX/cyclonedx-go"
)

func main() {
	version := flag.String("version", "", "version of the release")
	arch := flag.String("arch", "", "its architecture")
	flag.Parse()
	if err := run(os.Stdout, *version, *arch, flag.Arg(0)); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func run(output io.Writer, version, arch, directory string) error {
	licences, err := readLicences("NOTICE")
	if err != nil {
		return err
	}
	bom := cyclonedx.NewBOM()
	bom.Metadata = &cyclonedx.Metadata{Component: &cyclonedx.Component{
		BOMRef: "minicri", Type: cyclonedx.ComponentTypeApplication, Name: "minicri", Version: version,
		PackageURL: "pkg:golang/github.com/minicri/minicri@" + version + "?goarch=" + arch + "&goos=linux",
		Licenses:   licence("Apache-2.0"),
	}}
	components := map[string]cyclonedx.Component{}
	var dependencies []cyclonedx.Dependency
	if err := readPrograms(directory, func(name string, info *debug.BuildInfo) error {
		uses := []string{add(components, library("stdlib", info.GoVersion, "BSD-3-Clause"))}
		for _, module := range append(info.Deps, &info.Main) {
			if module.Replace != nil {
				module = module.Replace
			}
			if strings.HasPrefix(module.Path, "github.com/minicri/minicri") {
				continue
			}
			which, known := licences[module.Path+" "+module.Version]
			if !known {
				return fmt.Errorf("%s: NOTICE does not name %s %s: run make generate", name, module.Path, module.Version)
			}
			uses = append(uses, add(components, library(module.Path, module.Version, which...)))
		}
		if filepath.Base(name) == "minicri-shim" {
			libraries, err := cLibraries(arch)
			if err != nil {
				return err
			}
			for _, c := range libraries {
				uses = append(uses, add(components, c))
			}
		}
		slices.Sort(uses)
		components[name] = cyclonedx.Component{BOMRef: name, Type: cyclonedx.ComponentTypeApplication, Name: name, Version: version}
		dependencies = append(dependencies, cyclonedx.Dependency{Ref: name, Dependencies: &uses})
		return nil
	}); err != nil {
		return err
	}
	all := slices.Collect(maps.Values(components))
	slices.SortFunc(all, func(a, b cyclonedx.Component) int { return strings.Compare(a.BOMRef, b.BOMRef) })
	bom.Components, bom.Dependencies = &all, &dependencies
	return cyclonedx.NewBOMEncoder(output, cyclonedx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
}

// readPrograms reads the build information of the programs of Go below a directory, in
// the order of their names.
func readPrograms(directory string, each func(name string, info *debug.BuildInfo) error) error {
	programs := 0
	err := filepath.WalkDir(directory, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		info, err := buildinfo.ReadFile(path)
		if err != nil {
			return nil // a page, or the unit
		}
		programs++
		name, err := filepath.Rel(directory, path)
		if err != nil {
			return err
		}
		return each(name, info)
	})
	if err == nil && programs == 0 {
		err = fmt.Errorf("there is no program below %s", directory)
	}
	return err
}

func readLicences(file string) (map[string][]string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	licences := map[string][]string{}
	for _, line := range regexp.MustCompile(`(?m)^(\S+ v\S+): (.*)$`).FindAllStringSubmatch(string(text), -1) {
		licences[line[1]] = strings.Split(line[2], ", ")
	}
	return licences, nil
}

func library(path, version string, licences ...string) cyclonedx.Component {
	url := "pkg:golang/" + path + "@" + version
	return cyclonedx.Component{BOMRef: url, Type: cyclonedx.ComponentTypeLibrary, Name: path, Version: version, PackageURL: url, Licenses: licence(licences...)}
}

func licence(ids ...string) *cyclonedx.Licenses {
	var all cyclonedx.Licenses
	for _, id := range ids {
		all = append(all, cyclonedx.LicenseChoice{License: &cyclonedx.License{ID: id}})
	}
	return &all
}

// cLibraries are those that the shim is linked with, of Debian.
func cLibraries(arch string) (components []cyclonedx.Component, err error) {
	seccomp, glibc := installed("libseccomp-dev"), installed("libc6-dev")
	if arch == "arm64" {
		glibc = installed("libc6-dev-arm64-cross")
		seccomp = func() ([]byte, error) { return os.ReadFile("bin/release/arm64/.libseccomp-dev") }
	}
	for name, ask := range map[string]func() ([]byte, error){"libseccomp": seccomp, "glibc": glibc} {
		out, err := ask()
		if err != nil {
			return nil, fmt.Errorf("the version of %s: %w", name, err)
		}
		version := strings.TrimSpace(string(out))
		url := "pkg:deb/debian/" + name + "@" + version
		components = append(components, cyclonedx.Component{
			BOMRef: url, Type: cyclonedx.ComponentTypeLibrary, Name: name, Version: version, PackageURL: url, Licenses: licence("LGPL-2.1"),
		})
	}
	return components, nil
}

func installed(name string) func() ([]byte, error) {
	return exec.Command("dpkg-query", "-W", "-f", "${Version}", name).Output
}

func add(components map[string]cyclonedx.Component, c cyclonedx.Component) string {
	components[c.BOMRef] = c
	return c.BOMRef
}
