// Package soak lets pods come and go from several sides, as kubelets do, while the daemon is killed or told to end
// again and again at random moments, plugins fail and hang, networks that cannot work are configured, and the node
// reboots; and then looks for what is left. SOAK is how long (20s unless set; make soak sets 5m), SEED what the
// random choices follow from; it is printed, though moments are never quite the same twice.
package soak
