package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/errtext"
)

// Image is an image as people and programs read it.
type Image struct {
	ID      string   `json:"id"`
	Tags    []string `json:"tags"`
	Digests []string `json:"digests"`
	Target  string   `json:"target"` // the digest of its manifest or index
	Size    int64    `json:"size"`
}

func imagesOf(images ...image.Image) []Image {
	all := make([]Image, len(images))
	for i, one := range images {
		all[i] = Image{ID: one.ID, Tags: one.RepoTags, Digests: one.RepoDigests, Target: one.Target.String(), Size: one.Size}
	}
	return all
}

// PullUpdate is a line of the answer to a pull: progress or, last, the image or the error.
type PullUpdate struct {
	Progress *image.Progress `json:",omitempty"`
	Image    *Image          `json:",omitempty"`
	Error    string          `json:",omitempty"`
}

// ImageRoutes serves what `minicri image` asks of an image store. The CRI has no calls for archives, nor for
// the progress of a pull.
//
//	GET /images                    the images
//	DELETE /images?name=           removes one, with all its names
//	DELETE /images/name?name=      removes one name
//	POST /images/tag?name=&as=     gives an image one more name
//	GET /images/inspect?name=      an image.Description
//	POST /images/import            the images of the archive that is sent
//	GET /images/save?name=         an archive; the trailer Error says what it lacks
//	POST /images/pull?name=        takes an image.Auth, answers with lines of PullUpdate
//
// enter, if any, counts a call that changes something, or refuses it. logger gets a line for each pull.
func ImageRoutes(mux *http.ServeMux, images *image.Store, logger *slog.Logger, enter func() (leave func(), err error)) {
	handle := func(pattern string, serve http.HandlerFunc) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if enter != nil && r.Method != http.MethodGet && r.Method != http.MethodHead {
				leave, err := enter()
				if err != nil {
					answer(w, nil, err)
					return
				}
				defer leave()
			}
			// A cancelled request does not wait for its client.
			stop := context.AfterFunc(r.Context(), func() {
				connection := http.NewResponseController(w)
				_ = connection.SetReadDeadline(time.Now())
				_ = connection.SetWriteDeadline(time.Now().Add(lastRequests / 2)) // for the error
			})
			defer stop()
			serve(w, r)
		})
	}
	for pattern, do := range map[string]func(r *http.Request, name string) (any, error){
		"GET /images": func(*http.Request, string) (any, error) { return imagesOf(images.List()...), nil },
		"DELETE /images": func(r *http.Request, name string) (any, error) {
			if _, err := images.Get(name); err != nil { // Remove succeeds for none
				return nil, err
			}
			return nil, images.Remove(r.Context(), name)
		},
		"DELETE /images/name": func(r *http.Request, name string) (any, error) {
			if _, err := images.Get(name); err != nil {
				return nil, err
			}
			return nil, images.Untag(r.Context(), name)
		},
		"POST /images/tag": func(r *http.Request, name string) (any, error) {
			return nil, images.Tag(r.Context(), name, r.URL.Query().Get("as"))
		},
		"GET /images/inspect": func(r *http.Request, name string) (any, error) { return images.Describe(r.Context(), name) },
		"POST /images/import": func(r *http.Request, _ string) (any, error) {
			imported, err := images.Import(r.Context(), r.Body)
			_, _ = io.Copy(io.Discard, r.Body) // who is still sending reads no answer
			return imagesOf(imported...), err
		},
	} {
		handle(pattern, func(w http.ResponseWriter, r *http.Request) {
			value, err := do(r, r.URL.Query().Get("name"))
			answer(w, value, err)
		})
	}
	handle("GET /images/save", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", archiveError)
		if err := images.Save(r.Context(), r.URL.Query().Get("name"), w); err != nil {
			w.Header().Set(archiveError, err.Error())
		}
	})
	handle("POST /images/pull", func(w http.ResponseWriter, r *http.Request) { servePull(w, r, images, logger) })
}

const archiveError = "Error"

// servePull drops progress that the client does not read: a pull never waits for its client.
func servePull(w http.ResponseWriter, r *http.Request, images *image.Store, logger *slog.Logger) {
	var auth image.Auth
	if err := json.NewDecoder(r.Body).Decode(&auth); err != nil {
		answer(w, nil, err)
		return
	}
	updates, lines, sent := make(chan image.Progress, 256), json.NewEncoder(w), make(chan struct{})
	go func() {
		defer close(sent)
		for p := range updates {
			_ = lines.Encode(PullUpdate{Progress: &p}) // a client that has left ends the pull
			_ = http.NewResponseController(w).Flush()
		}
	}()
	query, began := r.URL.Query(), time.Now()
	pulled, err := images.PullFor(r.Context(), query.Get("name"), query.Get("platform"), auth, func(p image.Progress) {
		select {
		case updates <- p:
		default:
		}
	})
	close(updates)
	<-sent
	last := PullUpdate{Image: &imagesOf(pulled)[0]}
	logger = logger.With("by", "minicri image pull", "image", query.Get("name"), "took", time.Since(began))
	if err != nil {
		last = PullUpdate{Error: errtext.Of(err)}
		logger.Error("pull failed", "err", err)
	} else {
		logger.Info("image pulled", "id", pulled.ID, "size", pulled.Size)
	}
	_ = lines.Encode(last)
}

// Pull pulls an image by a request path, and reports the progress.
func (c Client) Pull(ctx context.Context, path string, auth io.Reader, progress func(image.Progress)) (Image, error) {
	response, err := c.Call(ctx, http.MethodPost, path, auth)
	if err != nil {
		return Image{}, err
	}
	defer response.Body.Close()
	for lines := json.NewDecoder(response.Body); ; {
		var update PullUpdate
		err := lines.Decode(&update)
		switch {
		case err != nil:
			return Image{}, err
		case update.Error != "":
			return Image{}, errors.New(update.Error)
		case update.Image != nil:
			return *update.Image, nil
		}
		progress(*update.Progress)
	}
}

// Import sends an archive, and returns its images.
func (c Client) Import(ctx context.Context, archive io.Reader) (imported []Image, err error) {
	response, err := c.Call(ctx, http.MethodPost, "/images/import", archive)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	err = json.NewDecoder(response.Body).Decode(&imported)
	return imported, err
}

// Save writes the archive that an ImageRoutes path returns.
func (c Client) Save(ctx context.Context, path string, archive io.Writer) error {
	response, err := c.Call(ctx, http.MethodGet, path, http.NoBody)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if _, err := io.Copy(archive, response.Body); err != nil {
		return err
	}
	if text := response.Trailer.Get(archiveError); text != "" {
		return errors.New(text)
	}
	return nil
}
