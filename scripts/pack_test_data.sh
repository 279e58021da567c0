#!/usr/bin/env bash
# Packs tests/data/vectors and tests/data/fixtures into the archives that are committed; the same
# files give the same bytes. Run it after changing either folder.
set -euo pipefail
cd "$(dirname "$0")/../tests/data"
for name in vectors fixtures; do
  tar --sort=name --mtime=2026-01-01 --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
    --exclude=.unpacked -c "$name" | xz -9e -T1 > "$name.tar.xz.tmp"
  mv "$name.tar.xz.tmp" "$name.tar.xz"
  sha256sum "$name.tar.xz" | cut -d' ' -f1 | tr -d '\n' > "$name/.unpacked"
done
ls -l ./*.tar.xz
