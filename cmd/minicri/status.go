package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/duration"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/timeline"
)

// nodeStatus is the state of the runtime on one screen.
type nodeStatus struct {
	Version         string               `json:"version"`
	StartedAt       time.Time            `json:"startedAt"`
	Socket          string               `json:"socket"`
	Conditions      []statusCondition    `json:"conditions"`
	Pods            map[string]int       `json:"pods"`       // state to number
	Containers      map[string]int       `json:"containers"` // state to number
	Network         string               `json:"network,omitempty"`
	NetworkFile     string               `json:"networkFile,omitempty"`
	NetworkPlugins  []string             `json:"networkPlugins"`
	NetworkProblems []string             `json:"networkProblems"`
	PendingDELs     int                  `json:"pendingDELs"`
	CgroupDriver    string               `json:"cgroupDriver"`
	Handlers        []statusHandler      `json:"handlers"`
	NRI             bool                 `json:"nri"`
	NRIPlugins      []string             `json:"nriPlugins"`
	DaemonBytes     uint64               `json:"daemonBytes"`
	SupervisorBytes uint64               `json:"supervisorBytes"`
	OlderBuilds     []timeline.Older     `json:"olderBuilds"`
	Images          int                  `json:"images"`
	ImageBytes      uint64               `json:"imageBytes"`
	ContainerBytes  uint64               `json:"containerBytes"` // the size of writable layers
	Pulls           []image.PullUnderWay `json:"pulls"`
	LastErrors      []statusError        `json:"lastErrors"`
}

type statusCondition struct {
	Type    string `json:"type"`
	Holds   bool   `json:"holds"`
	Message string `json:"message,omitempty"`
}

type statusHandler struct {
	Name    string `json:"name"`
	Problem string `json:"problem,omitempty"`
}

type statusError struct {
	At   time.Time `json:"at"`
	Name string    `json:"name"` // a pod or an image
	Text string    `json:"text"`
}

// lastErrors is the number of errors on the screen.
const lastErrors = 5

func statusCommand(cmd *cobra.Command, _ []string) error {
	c, err := look(cmd)
	if err != nil {
		return err
	}
	return c.watch(cmd, func(ctx context.Context, style timeline.Style) error {
		status, err := readStatus(ctx, c)
		if err != nil {
			return err
		}
		err = c.show(cmd, status, func(output io.Writer) error { return status.print(output, style, time.Now()) })
		if err == nil && !c.has("watch") && !status.healthy() {
			return errors.New("the node is not ready, see above")
		}
		return err
	})
}

// healthy reports whether the two conditions hold that the kubelet needs to run pods.
func (s *nodeStatus) healthy() bool {
	return !slices.ContainsFunc(s.Conditions, func(c statusCondition) bool {
		return !c.Holds && (c.Type == runtimeapi.RuntimeReady || c.Type == runtimeapi.NetworkReady)
	})
}

// readStatus reads the status of the daemon by the CRI and by its debug socket.
func readStatus(ctx context.Context, c call) (*nodeStatus, error) {
	answer, err := verboseStatus(ctx, c.Socket)
	if err != nil {
		return nil, fmt.Errorf("ask the daemon for its status: %w", err)
	}
	if answer == nil {
		return nil, noDaemon(c.Socket)
	}
	s := &nodeStatus{Socket: c.Socket, Pods: map[string]int{}, Containers: map[string]int{}, NetworkPlugins: []string{}}
	for _, one := range answer.GetStatus().GetConditions() {
		s.Conditions = append(s.Conditions, statusCondition{one.GetType(), one.GetStatus(), one.GetMessage()})
	}
	if err := errors.Join(s.readInfo(answer), s.readRuntime(ctx, c), s.readDaemon(ctx, c)); err != nil {
		return nil, fmt.Errorf("read the status of the daemon: %w", err)
	}
	return s, nil
}

func noDaemon(socket string) error {
	return fmt.Errorf("no daemon serves %s: start it: systemctl start minicri, or name its socket: --socket", socket)
}

// readInfo reads the verbose part of the CRI's Status.
func (s *nodeStatus) readInfo(answer *runtimeapi.StatusResponse) (err error) {
	info := answer.GetInfo()
	var network struct {
		Name, File string
		Config     struct{ Plugins []struct{ Type string } }
	}
	var daemon struct{ StartedAt time.Time } // zero from an older daemon
	err = errors.Join(decodeInfo(info["cniconfig"], &network), decodeInfo(info["daemon"], &daemon))
	s.Network, s.NetworkFile = network.Name, network.File
	for _, plugin := range network.Config.Plugins {
		s.NetworkPlugins = append(s.NetworkPlugins, plugin.Type)
	}
	s.StartedAt = daemon.StartedAt
	var errs [5]error
	s.NetworkProblems, errs[0] = items[string](answer, "networkProblems")
	s.Handlers, errs[1] = items[statusHandler](answer, "handlers")
	s.Pulls, errs[2] = items[image.PullUnderWay](answer, "pulls")
	pending, pendingErr := items[struct{}](answer, "pendingAttachments")
	s.PendingDELs, errs[3] = len(pending), pendingErr
	_, s.NRI = info["nriPlugins"]
	s.NRIPlugins, errs[4] = items[string](answer, "nriPlugins")
	return errors.Join(err, errors.Join(errs[:]...))
}

func decodeInfo(text string, into any) error {
	if text == "" {
		return nil
	}
	return json.Unmarshal([]byte(text), into)
}

// readRuntime uses other calls of the CRI.
func (s *nodeStatus) readRuntime(ctx context.Context, c call) error {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	daemon, err := daemonAt(ctx, c.Socket)
	if err != nil {
		return err
	}
	version, err := daemon.Version(ctx, &runtimeapi.VersionRequest{})
	if err != nil {
		return withoutCode(err)
	}
	s.Version = version.GetRuntimeVersion()
	config, err := daemon.RuntimeConfig(ctx, &runtimeapi.RuntimeConfigRequest{})
	if err != nil {
		return withoutCode(err)
	}
	s.CgroupDriver = strings.ToLower(config.GetLinux().GetCgroupDriver().String())
	containers, err := daemon.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return withoutCode(err)
	}
	for _, one := range containers.GetContainers() {
		s.Containers[strings.ToLower(strings.TrimPrefix(one.GetState().String(), "CONTAINER_"))]++
	}
	connection, err := connect(ctx, c.Socket)
	if err != nil {
		return err
	}
	disk, err := runtimeapi.NewImageServiceClient(connection).ImageFsInfo(ctx, &runtimeapi.ImageFsInfoRequest{})
	if err != nil {
		return withoutCode(err)
	}
	for _, one := range disk.GetImageFilesystems() {
		s.ImageBytes += one.GetUsedBytes().GetValue()
	}
	for _, one := range disk.GetContainerFilesystems() {
		s.ContainerBytes += one.GetUsedBytes().GetValue()
	}
	return nil
}

// readDaemon uses the debug socket.
func (s *nodeStatus) readDaemon(ctx context.Context, c call) error {
	daemon := inspect.NewClient(inspect.DebugSocket(c.State))
	glance, err := daemon.Glance(ctx)
	if err != nil {
		return err
	}
	s.DaemonBytes, s.SupervisorBytes, s.OlderBuilds = glance.Daemon, glance.Supervisors, glance.Older
	for _, pod := range glance.Pods {
		s.Pods[pod.State]++
	}
	var images []inspect.Image
	if err := daemon.JSON(ctx, "/images", &images); err != nil {
		return err
	}
	s.Images = len(images)
	pods, err := daemon.Timelines(ctx, "")
	if err != nil {
		return err
	}
	s.LastErrors = errorsOf(pods)
	return nil
}

// errorsOf returns the last problems of pods, the newest first.
func errorsOf(pods []timeline.Pod) (all []statusError) {
	for _, p := range pods {
		for _, problem := range p.Problems() {
			text := problem.Of + ": " + problem.Text
			if problem.Step != "" {
				text = problem.Of + " at " + problem.Step + ": " + problem.Text
			}
			all = append(all, statusError{p.LastChange(), p.Name, text})
		}
	}
	slices.SortStableFunc(all, func(a, b statusError) int { return b.At.Compare(a.At) })
	return all[:min(len(all), lastErrors)]
}

func (s *nodeStatus) print(output io.Writer, style timeline.Style, now time.Time) error {
	var b strings.Builder
	line := func(name, format string, values ...any) {
		fmt.Fprintf(&b, "%-12s %s\n", name, redact.Line(fmt.Sprintf(format, values...)))
	}
	line("minicri", "%s, up %s, serves %s", s.Version, duration.HumanDuration(now.Sub(s.StartedAt)), s.Socket)
	for _, c := range s.Conditions {
		sign := "✓"
		if !c.Holds {
			sign = "✗"
		}
		line("", "%s %s %s", sign, c.Type, c.Message)
	}
	line("pods", "%s; containers: %s", countsOf(s.Pods), countsOf(s.Containers))
	line("network", "%s (%s) from %s", orNone(s.Network), strings.Join(s.NetworkPlugins, ", "), orNone(s.NetworkFile))
	for _, problem := range s.NetworkProblems {
		line("", "✗ %s", problem)
	}
	if s.PendingDELs > 0 {
		line("", "! %d attachments wait for CNI DEL: minicri check names them", s.PendingDELs)
	}
	line("cgroups", "driver %s", s.CgroupDriver)
	handlers := []string{}
	for _, h := range s.Handlers {
		text := orNone(h.Name)
		if h.Name == "" {
			text = "default"
		}
		if h.Problem != "" {
			text += " (✗ " + h.Problem + ")"
		}
		handlers = append(handlers, text)
	}
	line("handlers", "%s", strings.Join(handlers, ", "))
	nri := "off"
	if s.NRI {
		nri = orNone(strings.Join(s.NRIPlugins, ", "))
	}
	line("nri plugins", "%s", nri)
	bytes := func(number uint64) string { return humanSize(int64(number)) }
	line("memory", "daemon %s, supervisors %s", bytes(s.DaemonBytes), bytes(s.SupervisorBytes))
	for _, older := range s.OlderBuilds {
		line("", "supervisor of build %s (%s): %d pods %s", older.Build, older.Version, older.Pods, older.Problem)
	}
	line("disk", "%d images %s, writable layers %s", s.Images, bytes(s.ImageBytes), bytes(s.ContainerBytes))
	for _, p := range s.Pulls {
		rate := float64(p.Done) / max(p.Took.Seconds(), 0.001)
		line("pull", "%s %s: %s of %s, %s/s, since %s", p.Reference, p.Stage, humanSize(p.Done), humanSize(p.Total),
			humanSize(int64(rate)), duration.HumanDuration(p.Took))
	}
	for i, e := range s.LastErrors {
		name := ""
		if i == 0 {
			name = "last errors"
		}
		line(name, "%s ago, %s: %s", duration.HumanDuration(now.Sub(e.At)), e.Name, e.Text)
	}
	text := b.String()
	if style.Height > 0 { // the screen is redrawn, and must not scroll
		lines := strings.SplitAfter(text, "\n")
		text = ""
		for _, l := range lines[:min(len(lines), style.Height-1)] {
			text += cutLine(l, style.Width)
		}
	}
	_, err := io.WriteString(output, text)
	return err
}

func cutLine(line string, columns int) string {
	letters := []rune(strings.TrimSuffix(line, "\n"))
	if columns > 0 && len(letters) > columns {
		letters = append(letters[:columns-1], '…')
	}
	return string(letters) + "\n"
}

func countsOf(counts map[string]int) string {
	texts := []string{}
	for state, count := range counts {
		texts = append(texts, fmt.Sprintf("%d %s", count, state))
	}
	slices.Sort(texts)
	return orNone(strings.Join(texts, ", "))
}

func orNone(text string) string {
	if text == "" {
		return "none"
	}
	return text
}
