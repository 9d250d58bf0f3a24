package process

// For the tests.
const ReapAfter = reapAfter

var AddSeals = addSeals
