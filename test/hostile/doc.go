// Package hostile attacks a node with images, registries, containers and stream
// clients that are made to be hostile, and shows that nothing gives way.
package hostile
