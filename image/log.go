package image

import (
	"io"
	"log/slog"

	"github.com/containerd/log"
	"github.com/sirupsen/logrus"
)

// libraryLog passes what containerd's packages log to logger, all of it for
// debugging: what went wrong they also return, and what they find worth a line
// (a mirror that did not answer, TLS tried before HTTP) comes with every pull.
func libraryLog(logger *slog.Logger) *log.Entry {
	library := logrus.New()
	library.SetOutput(io.Discard)
	library.SetLevel(logrus.DebugLevel)
	library.AddHook(debugHook{logger})
	return logrus.NewEntry(library)
}

type debugHook struct{ logger *slog.Logger }

func (debugHook) Levels() []logrus.Level { return logrus.AllLevels }

func (h debugHook) Fire(entry *logrus.Entry) error {
	if !h.logger.Enabled(entry.Context, slog.LevelDebug) {
		return nil
	}
	fields := []any{"library_level", entry.Level.String()}
	for key, value := range entry.Data {
		fields = append(fields, key, value)
	}
	h.logger.Debug(entry.Message, fields...)
	return nil
}
