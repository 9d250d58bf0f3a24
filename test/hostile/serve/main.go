// Command serve is the hostile registry of test/hostile, for trials by hand:
//
//	go run ./test/hostile/serve -listen 127.0.0.1:5000
//	crictl pull 127.0.0.1:5000/deep:1
package main

import (
	"flag"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/minicri/minicri/test/hostile/registry"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:5000", "where to serve")
	flag.Parse()
	content := registry.New()
	for name, word := range content.Spoilt() {
		fmt.Printf("%s/%s:1 is to be refused with the word %q\n", *listen, name, word)
	}
	server := &http.Server{Addr: *listen, Handler: content, ReadHeaderTimeout: 10 * time.Second}
	if err := server.ListenAndServe(); err != nil {
		fmt.Fprintln(os.Stderr, "serve:", err)
		os.Exit(1)
	}
}
