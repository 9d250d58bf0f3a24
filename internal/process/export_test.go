package process

// ReapAfter is how long the tests wait, too.
const ReapAfter = reapAfter
