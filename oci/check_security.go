package oci

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const securityContext = "config.linux.security_context."

// privileged: the pod has to say beforehand that such a container will come.
func (c *containerCheck) privileged() {
	if c.security().GetPrivileged() && !c.pod.GetLinux().GetSecurityContext().GetPrivileged() {
		c.bad(securityContext+"privileged", "is set, but the pod is not privileged")
	}
}

func (c *containerCheck) capabilities() {
	if c.security().GetPrivileged() {
		return // which has all
	}
	asked := c.security().GetCapabilities()
	drop := capabilityNames(asked.GetDropCapabilities())
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
func (c *containerCheck) addedCapabilities(list string, names, drop []string) {
	for i, name := range capabilityNames(names) {
		field := fmt.Sprintf("%scapabilities.%s[%d]", securityContext, list, i)
		switch {
		case !knownCapability(name):
			c.bad(field, "%q is unknown", name)
		case name != allCapabilities && !slices.Contains(drop, name) && !slices.Contains(c.machine.Capabilities, name):
			c.bad(field, "the runtime itself does not have %s on this machine", name)
		}
	}
}

func (c *containerCheck) namespaces() {
	const field = securityContext + "namespace_options."
	o := c.security().GetNamespaceOptions()
	const pod, container, node, target = runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_CONTAINER, runtimeapi.NamespaceMode_NODE, runtimeapi.NamespaceMode_TARGET
	c.mode(field+"network", o.GetNetwork(), pod, node)
	c.mode(field+"ipc", o.GetIpc(), pod, node)
	c.mode(field+"pid", o.GetPid(), pod, container, node, target)
	if (o.GetPid() == target) != (o.GetTargetId() != "") {
		c.bad(field+"target_id", "%q with the pid mode %v: TARGET and a target_id go together", o.GetTargetId(), o.GetPid())
	}
	if o.GetPid() == node && UserNamespace(c.pod) != nil {
		c.bad(field+"pid", "is NODE, which a pod with a user namespace of its own cannot have")
	}
	c.userNamespace(field+"userns_options", o.GetUsernsOptions())
}

func (c *containerCheck) mode(field string, mode runtimeapi.NamespaceMode, allowed ...runtimeapi.NamespaceMode) {
	if !slices.Contains(allowed, mode) {
		c.bad(field, "%v is not one of %v", mode, allowed)
	}
}

// userNamespace: a container has the user namespace of its pod, so it cannot
// ask for another one; it need not ask.
func (c *containerCheck) userNamespace(field string, asked *runtimeapi.UserNamespace) {
	own := UserNamespace(c.pod)
	switch {
	case asked == nil:
	case asked.GetMode() != runtimeapi.NamespaceMode_POD && asked.GetMode() != runtimeapi.NamespaceMode_NODE:
		c.bad(field+".mode", "%v is not one of POD and NODE", asked.GetMode())
	case asked.GetMode() == runtimeapi.NamespaceMode_NODE && own == nil:
	case !proto.Equal(asked, own):
		c.bad(field, "is not that of the pod")
	}
}

func (c *containerCheck) user() {
	security := c.security()
	username := security.GetRunAsUsername()
	if security.GetRunAsUser() != nil {
		c.id(securityContext+"run_as_user", security.GetRunAsUser().GetValue())
		if username != "" {
			c.bad(securityContext+"run_as_username", "is set beside run_as_user")
		}
	}
	c.username(username)
	if group := security.GetRunAsGroup(); group != nil {
		c.id(securityContext+"run_as_group", group.GetValue())
		if security.GetRunAsUser() == nil && username == "" {
			c.bad(securityContext+"run_as_group", "is set without run_as_user or run_as_username")
		}
	}
	for i, group := range security.GetSupplementalGroups() {
		c.id(fmt.Sprintf("%ssupplemental_groups[%d]", securityContext, i), group)
	}
	if _, known := runtimeapi.SupplementalGroupsPolicy_name[int32(security.GetSupplementalGroupsPolicy())]; !known {
		c.bad(securityContext+"supplemental_groups_policy", "%d is unknown", security.GetSupplementalGroupsPolicy())
	}
}

// username: a name has to be found in the image; a number would be taken even
// if nobody has it.
func (c *containerCheck) username(name string) {
	if strings.ContainsAny(name, ":\n\x00") {
		c.bad(securityContext+"run_as_username", "%q is not a name of a user", name)
	}
	if _, err := strconv.ParseInt(name, 10, 64); err == nil {
		c.bad(securityContext+"run_as_username", "%q is a number: give it as run_as_user", name)
	}
}

func (c *containerCheck) hiddenPaths() {
	for list, paths := range map[string][]string{"masked_paths": c.security().GetMaskedPaths(), "readonly_paths": c.security().GetReadonlyPaths()} {
		for i, name := range paths {
			c.absolute(fmt.Sprintf("%s%s[%d]", securityContext, list, i), name)
		}
	}
}

// profiles: those of a privileged container are not applied.
func (c *containerCheck) profiles() {
	if c.security().GetPrivileged() {
		return
	}
	seccomp, apparmor := ContainerSeccomp(c.security()), ContainerAppArmor(c.security())
	c.profileType("seccomp.profile_type", seccomp)
	c.profileType("apparmor.profile_type", apparmor)
	if err := CheckSeccomp(seccomp); err != nil {
		c.bad(securityContext+"seccomp", "%w", err)
	}
	if err := CheckAppArmor(apparmor, c.machine); err != nil {
		c.bad(securityContext+"apparmor", "%w", err)
	}
}

func (c *containerCheck) profileType(field string, profile *runtimeapi.SecurityProfile) {
	if _, known := runtimeapi.SecurityProfile_ProfileType_name[int32(profile.GetProfileType())]; !known {
		c.bad(securityContext+field, "%d is unknown", profile.GetProfileType())
	}
}
