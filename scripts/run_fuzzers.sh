#!/usr/bin/env bash
# Runs every *_fuzz binary of a build folder for a number of seconds; stops at the first finding.
# usage: run_fuzzers.sh BUILD_DIR SECONDS
set -euo pipefail
found=0
while IFS= read -r fuzzer; do
  found=1
  corpus="$1/corpus/$(basename "$fuzzer")"
  mkdir -p "$corpus"
  echo "fuzzing $(basename "$fuzzer") for $2 s"
  "$fuzzer" -max_total_time="$2" -rss_limit_mb=4096 -timeout=10 -print_final_stats=1 \
    -artifact_prefix="$1/" "$corpus" 2>&1 | tail -n 8
done < <(find "$1/src" -name '*_fuzz' -type f -perm -u+x | sort)
[ "$found" -eq 1 ] || { echo "run_fuzzers.sh: no fuzz binary under $1/src" >&2; exit 1; }
