package validate

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/capability"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/oci"
)

const securityContext = "config.linux.security_context."

// privileged: the pod has to say beforehand that such a container will come.
func (c *container) privileged() {
	if c.security().GetPrivileged() && !c.pod.GetLinux().GetSecurityContext().GetPrivileged() {
		c.bad(securityContext+"privileged", "is set, but the pod is not privileged")
	}
}

func (c *container) capabilities() {
	if c.security().GetPrivileged() {
		return // which has all
	}
	asked := c.security().GetCapabilities()
	drop := oci.CapabilityNames(asked.GetDropCapabilities())
	for i, name := range drop {
		if !knownCapability(name) {
			c.bad(fmt.Sprintf("%scapabilities.drop_capabilities[%d]", securityContext, i), "%q is unknown", name)
		}
	}
	c.addedCapabilities("add_capabilities", asked.GetAddCapabilities(), drop)
	c.addedCapabilities("add_ambient_capabilities", asked.GetAddAmbientCapabilities(), drop)
}

// addedCapabilities: what the daemon has not it cannot give; "all" means all
// that it has.
func (c *container) addedCapabilities(list string, names, drop []string) {
	for i, name := range oci.CapabilityNames(names) {
		field := fmt.Sprintf("%scapabilities.%s[%d]", securityContext, list, i)
		switch {
		case !knownCapability(name):
			c.bad(field, "%q is unknown", name)
		case name != oci.AllCapabilities && !slices.Contains(drop, name) && !slices.Contains(c.machine.Capabilities, name):
			c.bad(field, "the runtime itself does not have %s on this machine", name)
		}
	}
}

func (c *container) namespaces() {
	const field = securityContext + "namespace_options."
	o := c.security().GetNamespaceOptions()
	const ofPod, ofContainer, ofNode, ofTarget = runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_CONTAINER, runtimeapi.NamespaceMode_NODE, runtimeapi.NamespaceMode_TARGET
	c.mode(field+"network", o.GetNetwork(), ofPod, ofNode)
	c.mode(field+"ipc", o.GetIpc(), ofPod, ofNode)
	c.mode(field+"pid", o.GetPid(), ofPod, ofContainer, ofNode, ofTarget)
	if (o.GetPid() == ofTarget) != (o.GetTargetId() != "") {
		c.bad(field+"target_id", "%q with the pid mode %v: TARGET and a target_id go together", o.GetTargetId(), o.GetPid())
	}
	if o.GetPid() == ofNode && oci.UserNamespace(c.pod) != nil {
		c.bad(field+"pid", "is NODE, which a pod with a user namespace of its own cannot have")
	}
	c.userNamespace(field+"userns_options", o.GetUsernsOptions())
}

// userNamespace: a container has the user namespace of its pod, so it cannot
// ask for another one; it need not ask.
func (c *container) userNamespace(field string, asked *runtimeapi.UserNamespace) {
	own := oci.UserNamespace(c.pod)
	switch {
	case asked == nil:
	case asked.GetMode() != runtimeapi.NamespaceMode_POD && asked.GetMode() != runtimeapi.NamespaceMode_NODE:
		c.bad(field+".mode", "%v is not one of POD and NODE", asked.GetMode())
	case asked.GetMode() == runtimeapi.NamespaceMode_NODE && own == nil:
	case !proto.Equal(asked, own):
		c.bad(field, "is not that of the pod")
	}
}

func (c *container) user() {
	security := c.security()
	username := security.GetRunAsUsername()
	if security.GetRunAsUser() != nil {
		c.posixID(securityContext+"run_as_user", security.GetRunAsUser().GetValue())
		if username != "" {
			c.bad(securityContext+"run_as_username", "is set, and so is run_as_user")
		}
	}
	c.username(username)
	if group := security.GetRunAsGroup(); group != nil {
		c.posixID(securityContext+"run_as_group", group.GetValue())
		if security.GetRunAsUser() == nil && username == "" {
			c.bad(securityContext+"run_as_group", "is set without run_as_user or run_as_username")
		}
	}
	for i, group := range security.GetSupplementalGroups() {
		c.posixID(fmt.Sprintf("%ssupplemental_groups[%d]", securityContext, i), group)
	}
	known(&c.problems, securityContext+"supplemental_groups_policy", runtimeapi.SupplementalGroupsPolicy_name, security.GetSupplementalGroupsPolicy())
}

// username: a name has to be found in the image; a number would be taken even
// if no one has it.
func (c *container) username(name string) {
	if strings.ContainsAny(name, ":\n\x00") {
		c.bad(securityContext+"run_as_username", "%q is not a name of a user", name)
	}
	if _, err := strconv.ParseInt(name, 10, 64); err == nil {
		c.bad(securityContext+"run_as_username", "%q is a number: give it as run_as_user", name)
	}
}

func (c *container) hiddenPaths() {
	for list, paths := range map[string][]string{"masked_paths": c.security().GetMaskedPaths(), "readonly_paths": c.security().GetReadonlyPaths()} {
		for i, name := range paths {
			c.absolute(fmt.Sprintf("%s%s[%d]", securityContext, list, i), name)
		}
	}
}

// profiles are those of a pod or a container.
func (p *problems) profiles(seccomp, apparmor *runtimeapi.SecurityProfile, m machine.Machine) {
	known(p, securityContext+"seccomp.profile_type", runtimeapi.SecurityProfile_ProfileType_name, seccomp.GetProfileType())
	known(p, securityContext+"apparmor.profile_type", runtimeapi.SecurityProfile_ProfileType_name, apparmor.GetProfileType())
	if err := checkSeccomp(seccomp); err != nil {
		p.bad(securityContext+"seccomp", "%w", err)
	}
	if err := checkAppArmor(apparmor, m); err != nil {
		p.bad(securityContext+"apparmor", "%w", err)
	}
}

// knownCapability: the kernel of some machine has it (capabilities(7)).
func knownCapability(name string) bool {
	return name == oci.AllCapabilities || slices.ContainsFunc(capability.ListKnown(), func(known capability.Cap) bool {
		return oci.CapabilityNames([]string{known.String()})[0] == name
	})
}

// errNoAppArmor: a profile was asked for by name on a machine without AppArmor.
var errNoAppArmor = errors.New("this machine has no AppArmor")

// checkAppArmor reports why an AppArmor profile cannot be used.
func checkAppArmor(profile *runtimeapi.SecurityProfile, m machine.Machine) error {
	if profile.GetProfileType() != runtimeapi.SecurityProfile_Localhost {
		return nil
	}
	if !m.AppArmor {
		return fmt.Errorf("profile %q: %w", profile.GetLocalhostRef(), errNoAppArmor)
	}
	return checkLoaded(strings.TrimPrefix(profile.GetLocalhostRef(), "localhost/"))
}

func checkLoaded(name string) error {
	loaded, err := os.ReadFile("/sys/kernel/security/apparmor/profiles")
	if err != nil {
		return fmt.Errorf("list the loaded AppArmor profiles: %w", err)
	}
	for line := range strings.Lines(string(loaded)) {
		if strings.HasPrefix(line, name+" (") {
			return nil
		}
	}
	return fmt.Errorf("AppArmor profile %q is not loaded: load it with apparmor_parser", name)
}

// checkSeccomp reports why a seccomp profile cannot be used.
func checkSeccomp(profile *runtimeapi.SecurityProfile) error {
	if profile.GetProfileType() != runtimeapi.SecurityProfile_Localhost {
		return nil
	}
	ref := profile.GetLocalhostRef()
	if !filepath.IsAbs(ref) {
		return fmt.Errorf("localhost_ref %q is not an absolute path", ref)
	}
	if info, err := os.Stat(ref); err != nil {
		return err
	} else if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a file", ref)
	}
	return nil
}
