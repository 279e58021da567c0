#!/usr/bin/env bash
# Builds the test binaries of a build folder whose ctest name matches a pattern.
# usage: build_tests.sh BUILD_DIR PATTERN JOBS
set -euo pipefail
targets=$(ctest --test-dir "$1" -N -R "$2" | sed -n 's/^ *Test *#[0-9]*: //p')
[ -n "$targets" ] || { echo "build_tests.sh: no test matches $2" >&2; exit 1; }
# shellcheck disable=SC2086  # a list of target names
cmake --build "$1" -j "$3" --target $targets
