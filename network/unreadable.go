package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/containernetworking/cni/libcni"

	"github.com/minicri/minicri/internal/state"
)

// openUnreadable opens an attachment whose entry of the journal cannot be read.
// Its pod may run; its DEL gets what libcni remembers of its ADD, or where that
// is nothing, the configuration of now.
func (n *CNI) openUnreadable(bad state.Bad) {
	logger := n.options.Logger.With("sandbox", bad.ID, "file", bad.Path)
	logger.Error("attachment quarantined: it cannot be read", "err", bad.Reason)
	record, err := cachedAttachment(bad.ID)
	if errors.Is(err, fs.ErrNotExist) {
		record, err = n.guessedAttachment(bad.ID)
	}
	if err != nil {
		logger.Error("CNI DEL cannot be run: no configuration of its ADD is known; its addresses may have to be freed by hand", "err", err)
		return
	}
	logger.Warn("CNI DEL will run with the configuration that can still be found", "network", record.Network, "source", record.Source)
	a := newAttachment(record)
	a.begun, a.attached = true, true
	n.attachments[bad.ID] = a
	if _, err := os.Lstat(n.journal.Path(bad.ID)); err == nil {
		return // it is where it was, and may be readable the next time
	}
	if err := n.journal.Write(bad.ID, record); err != nil {
		logger.Error("the attachment is not in the journal on disk", "err", err)
	}
}

// cachedAttachment is what libcni's cache has of an ADD; fs.ErrNotExist if that
// is nothing.
func cachedAttachment(id string) (Attachment, error) {
	cached, err := libcni.NewCNIConfig(nil, nil).GetCachedAttachments(id)
	if err != nil {
		return Attachment{}, fmt.Errorf("read libcni's cache: %w", err)
	}
	for _, c := range cached {
		if c.IfName != eth0 {
			continue
		}
		a := Attachment{ID: id, Network: c.Network, Config: c.Config, Args: make(map[string]string), Source: "libcni's cache"}
		for _, arg := range c.CniArgs {
			a.Args[arg[0]] = arg[1]
		}
		for name, value := range c.CapabilityArgs {
			if err := a.SetCapability(name, value); err != nil {
				return a, err
			}
		}
		return a, nil
	}
	return Attachment{}, fs.ErrNotExist
}

// guessedAttachment is an attachment to the network of now.
func (n *CNI) guessedAttachment(id string) (Attachment, error) {
	configuration, err := n.Configuration()
	if err != nil {
		return Attachment{}, err
	}
	return Attachment{
		ID: id, Network: configuration.Name, Config: json.RawMessage(configuration.Bytes),
		Args: map[string]string{"IgnoreUnknown": "1", "K8S_POD_INFRA_CONTAINER_ID": id}, Source: "the configuration of now",
	}, nil
}
