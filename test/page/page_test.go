package page

import (
	"bytes"
	"context"
	"errors"
	"image"
	"image/color"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

func check(t testing.TB, err error) {
	t.Helper()
	harness.Check(t, err)
}

const patience = 2 * time.Minute

// chromium opens a page and returns what it prints. There is no network in here:
// a page that needed anything else would show it.
func chromium(t *testing.T, file string, arguments ...string) []byte {
	t.Helper()
	top, err := filepath.Abs("../../bin/debian/usr/lib")
	check(t, err)
	machine := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	libraries := filepath.Join(top, machine)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	command := exec.CommandContext(ctx, filepath.Join(top, "chromium", "chromium"), append([]string{
		"--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,1500", "--user-data-dir=" + t.TempDir(),
	}, append(arguments, "file://"+file)...)...)
	command.Env = append(os.Environ(), "LD_LIBRARY_PATH="+libraries+":"+filepath.Join(libraries, "pulseaudio"))
	output, err := command.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		t.Fatalf("chromium (make test-page fetches it): %v: %s", err, exit.Stderr)
	}
	check(t, err)
	return output
}

// picture is how the page looks, dark or light.
func picture(t *testing.T, file string, dark bool, to string) image.Image {
	t.Helper()
	scheme := map[bool]string{true: "0", false: "1"}[dark]
	chromium(t, file, "--blink-settings=preferredColorScheme="+scheme, "--screenshot="+to)
	data, err := os.ReadFile(to)
	check(t, err)
	decoded, err := png.Decode(bytes.NewReader(data))
	check(t, err)
	return decoded
}

// count counts the dots of a colour.
func count(picture image.Image, wanted color.RGBA) (dots int) {
	bounds := picture.Bounds()
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			if r, g, b, _ := picture.At(x, y).RGBA(); uint8(r>>8) == wanted.R && uint8(g>>8) == wanted.G && uint8(b>>8) == wanted.B {
				dots++
			}
		}
	}
	return dots
}

// The colours of page.css.
var (
	lightGround, darkGround = color.RGBA{0xfb, 0xfb, 0xfa, 255}, color.RGBA{0x14, 0x17, 0x1a, 255}
	lightBar, darkBar       = color.RGBA{0x3b, 0x7d, 0xd8, 255}, color.RGBA{0x5a, 0x9b, 0xf0, 255}
	lightPlugin             = color.RGBA{0x7a, 0x5f, 0xc7, 255}
	lightBad, darkBad       = color.RGBA{0xc6, 0x2f, 0x2f, 255}, color.RGBA{0xff, 0x7b, 0x72, 255}
)

func TestPageInABrowser(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox()
	pod := n.PodConfig("web")
	id := n.RunPod(pod)
	made, err := n.Runtime.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: id, SandboxConfig: pod, Config: &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "app"}, Image: &runtimeapi.ImageSpec{Image: harness.BusyboxImage}, Command: []string{"/bin/sleep", "1000000"},
	}})
	check(t, err)
	_, err = n.Runtime.StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: made.ContainerId})
	check(t, err)
	file := filepath.Join(n.Dir, "page.html")
	_, err = n.RunCommand("timeline", "web", "--html", file)
	check(t, err)

	document := string(chromium(t, file, "--dump-dom"))
	for _, want := range []string{
		"pod test/web", "host-local ADD", "app: create", `id="waterfall"`, `id="interfaces"`, "eth0", " in bridge " + n.Bridge, "default via 10.", `id="rules"`, "Result of ADD", "&quot;host-local&quot;",
	} {
		if !strings.Contains(document, want) && !strings.Contains(document, strings.ReplaceAll(want, "&quot;", `"`)) {
			t.Errorf("the page lacks %q", want)
		}
	}
	light, dark := picture(t, file, false, filepath.Join(n.Dir, "light.png")), picture(t, file, true, filepath.Join(n.Dir, "dark.png"))
	for _, wanted := range []struct {
		what    string
		picture image.Image
		color   color.RGBA
		least   int
	}{
		{"light ground", light, lightGround, 100000},
		{"bars", light, lightBar, 2000},
		{"bars of plugins", light, lightPlugin, 1000},
		{"dark ground", dark, darkGround, 100000},
		{"bars in the dark", dark, darkBar, 2000},
	} {
		if dots := count(wanted.picture, wanted.color); dots < wanted.least {
			t.Errorf("%s: %d dots", wanted.what, dots)
		}
	}
	if dots := count(light, lightBad) + count(dark, darkBad); dots > 0 {
		t.Errorf("a pod without a failure has %d red dots", dots)
	}
	keep(t, n)
}

func TestPageOfAFailureIsRed(t *testing.T) {
	n := harness.NewNode(t, harness.NoNetwork(), harness.Config("[limits]\nreload = '20ms'\n"))
	n.WriteConflist("10-test.conflist", n.BridgePlugin(), harness.Object{"type": "not-installed"})
	harness.Eventually(t, "the pod fails for the plugin", patience, func() bool {
		_, err := n.Runtime.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web")})
		return err != nil && strings.Contains(err.Error(), "not-installed")
	})
	file := filepath.Join(n.Dir, "page.html")
	_, err := n.RunCommand("timeline", "web", "--html", file)
	check(t, err)
	if document := string(chromium(t, file, "--dump-dom")); !strings.Contains(document, "the pod failed at cni add") {
		t.Error("the page does not say what failed")
	}
	if dots := count(picture(t, file, false, filepath.Join(n.Dir, "light.png")), lightBad); dots < 500 {
		t.Errorf("the failure has %d red dots", dots)
	}
	if dots := count(picture(t, file, true, filepath.Join(n.Dir, "dark.png")), darkBad); dots < 500 {
		t.Errorf("the failure has %d red dots in the dark", dots)
	}
	keep(t, n)
	check(t, os.WriteFile(filepath.Join(n.Plugins, "not-installed"), []byte("#!/bin/sh\n"), 0o755)) // for its DEL
}

// keep copies the pictures to the directory PAGE_PICTURES, to be looked at.
func keep(t *testing.T, n *harness.Node) {
	t.Helper()
	to := os.Getenv("PAGE_PICTURES")
	if to == "" {
		return
	}
	for _, name := range []string{"light.png", "dark.png", "page.html"} {
		data, err := os.ReadFile(filepath.Join(n.Dir, name))
		check(t, err)
		check(t, os.WriteFile(filepath.Join(to, t.Name()+"-"+name), data, 0o644))
	}
}
