// Package page opens the page that `minicri timeline --html` writes in headless
// Chromium (Debian's), and looks at what is there and at its pictures: a target
// of its own, make test-page, because Chromium is large.
package page
