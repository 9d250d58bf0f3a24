package validate

import (
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// set gives a field a value, by the path that a refusal names it by: "mounts[0].host_path".
func set(m protoreflect.Message, path string, value any) {
	name, rest, deeper := strings.Cut(path, ".")
	name, index, element := strings.Cut(strings.TrimSuffix(name, "]"), "[")
	field := m.Descriptor().Fields().ByName(protoreflect.Name(name))
	i, _ := strconv.Atoi(index)
	switch {
	case deeper && element:
		set(m.Mutable(field).List().Get(i).Message(), rest, value)
	case deeper:
		set(m.Mutable(field).Message(), rest, value)
	case value == nil:
		m.Clear(field)
	case element:
		m.Mutable(field).List().Set(i, valueOf(field, value))
	case field.IsList():
		m.Clear(field)
		for _, mapping := range value.([]*runtimeapi.IDMapping) {
			m.Mutable(field).List().Append(protoreflect.ValueOf(mapping.ProtoReflect()))
		}
	default:
		m.Set(field, valueOf(field, value))
	}
}

func valueOf(field protoreflect.FieldDescriptor, value any) protoreflect.Value {
	if message, is := value.(proto.Message); is {
		return protoreflect.ValueOf(message.ProtoReflect())
	}
	n, is := value.(int)
	switch {
	case !is:
		return protoreflect.ValueOf(value)
	case field.Kind() == protoreflect.EnumKind:
		return protoreflect.ValueOf(protoreflect.EnumNumber(n))
	case field.Kind() == protoreflect.Int32Kind:
		return protoreflect.ValueOf(int32(n))
	case field.Kind() == protoreflect.MessageKind:
		return protoreflect.ValueOf((&runtimeapi.Int64Value{Value: int64(n)}).ProtoReflect())
	}
	return protoreflect.ValueOf(int64(n))
}
