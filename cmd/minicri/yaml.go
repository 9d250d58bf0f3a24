package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// writeYAML writes a value as YAML. Texts are quoted as in JSON, which YAML reads.
func writeYAML(output io.Writer, value any) error {
	document, err := json.Marshal(value)
	if err != nil {
		return err
	}
	decoder := json.NewDecoder(bytes.NewReader(document))
	decoder.UseNumber()
	var read any
	if err := decoder.Decode(&read); err != nil {
		return err
	}
	var b bytes.Buffer
	yamlBlock(&b, read, "")
	_, err = output.Write(bytes.TrimPrefix(b.Bytes(), []byte("\n")))
	return err
}

// yamlBlock writes what follows a key or the dash of a list.
func yamlBlock(b *bytes.Buffer, value any, indent string) {
	switch v := value.(type) {
	case map[string]any:
		if len(v) == 0 {
			b.WriteString(" {}\n")
			return
		}
		b.WriteString("\n")
		for _, key := range slices.Sorted(maps.Keys(v)) {
			fmt.Fprintf(b, "%s%s:", indent, key)
			yamlBlock(b, v[key], indent+"  ")
		}
	case []any:
		if len(v) == 0 {
			b.WriteString(" []\n")
			return
		}
		b.WriteString("\n")
		for _, one := range v {
			var item bytes.Buffer
			yamlBlock(&item, one, indent+"  ")
			// The first key of a table is beside the dash.
			fmt.Fprintf(b, "%s- %s", indent, strings.TrimLeft(item.String(), "\n "))
		}
	default:
		text, _ := json.Marshal(v) // a text, a number, true, false or null
		fmt.Fprintf(b, " %s\n", text)
	}
}
