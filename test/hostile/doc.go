// Package hostile attacks a node as tenants, images, registries and the machine's
// local users could: the real daemon, with content that was made to harm it.
//
// A test that is an attack says so in its comment, in lines that begin with
// "attack:" (a subject, and what is tried), "held:" (how it ends here) and
// "field:" (what other runtimes do, where that is known). docs/security.md is
// made from these lines, of all packages; TestSecurityPageIsCurrent, at the top of
// the repository, holds it to them.
package hostile
