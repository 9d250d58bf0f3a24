#!/bin/sh
# Builds pause.elf, the program that holds a pod's namespaces, next to pause.c.
set -eu
cd "$(dirname "$0")"
${CC:-gcc} -Os -Wall -Werror -ffreestanding -fno-pie -fno-stack-protector -fno-asynchronous-unwind-tables -nostdlib -static -no-pie -s -Wl,--build-id=none -Wl,-z,noseparate-code -Wl,-z,noexecstack -o pause.elf pause.c
