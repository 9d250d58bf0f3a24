package main

import (
	"context"
	"errors"
	"io"
)

func demo(context.Context, []string, io.Writer) error { return errors.New("not yet") }
