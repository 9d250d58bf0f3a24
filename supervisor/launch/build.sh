#!/bin/sh
# Builds launch.elf, the program that makes a list of system calls, next to
# launch.c.
set -eu
cd "$(dirname "$0")"
${CC:-gcc} -Os -Wall -Werror -ffreestanding -fno-pie -fno-stack-protector -fno-asynchronous-unwind-tables -nostdlib -static -no-pie -s -Wl,--build-id=none -Wl,-z,noseparate-code -Wl,-z,noexecstack -o launch.elf launch.c
