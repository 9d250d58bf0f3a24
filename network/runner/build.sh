#!/bin/sh
# Builds runner.elf, the program that stands in for every CNI plugin, next to
# runner.c.
set -eu
cd "$(dirname "$0")"
${CC:-gcc} -Os -Wall -Werror -ffreestanding -fno-pie -fno-stack-protector -fno-asynchronous-unwind-tables -nostdlib -static -no-pie -s -Wl,--build-id=none -Wl,-z,noseparate-code -Wl,-z,noexecstack -o runner.elf runner.c
