#!/bin/sh
# Builds environ.elf, the program that puts bytes into an environment, next to
# environ.c.
set -eu
cd "$(dirname "$0")"
${CC:-gcc} -Os -Wall -Werror -ffreestanding -fno-pie -fno-stack-protector -fno-asynchronous-unwind-tables -nostdlib -static -no-pie -s -Wl,--build-id=none -Wl,-z,noseparate-code -Wl,-z,noexecstack -o environ.elf environ.c
