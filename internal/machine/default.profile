# The default of containers: what they need is theirs, the machine's settings
# and memory are not. A denial counts more than a permission, apparmor.d(5).

profile @PROFILE@ flags=(attach_disconnected,mediate_deleted) {
  network,
  capability,
  file,
  umount,
  unix,
  pivot_root,

  # Processes of one container see and signal each other, the daemon all.
  ptrace (trace, read, tracedby, readby) peer=@PROFILE@,
  signal (send, receive) peer=@PROFILE@,
  signal (receive) peer=unconfined,
  signal (receive) peer="@DAEMON@",

  deny mount,

  # The kernel's settings, but those of shared memory, which are the pod's.
  deny /proc/sys/{abi,crypto,debug,dev,fs,net,sunrpc,user,vm}/** wklx,
  deny /proc/sys/kernel/{[^s]*,s[^h]*,sh[^m]*} wklx,
  deny /proc/sys/kernel/{[^s]*,s[^h]*,sh[^m]*}/** wklx,
  deny /proc/{acpi,asound,bus,driver,fs,irq,scsi,tty}/** wklx,
  deny /proc/[^0-9]* wklx,
  deny /proc/{kcore,kmem,mem,sysrq-trigger} rwklx,

  # The machine's devices and file systems, but cgroups.
  deny /sys/{block,bus,class,dev,devices,hypervisor,kernel,module,power}/** wklx,
  deny /sys/fs/{[^c]*,c[^g]*,cg[^r]*}/** wklx,
  deny /sys/firmware/** rwklx,
  deny /sys/kernel/security/** rwklx,
  deny /sys/devices/virtual/powercap/** rwklx,
}
