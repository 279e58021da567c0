#!/usr/bin/env bash
# Installs the Debian packages of one stage (build, test or fuzz) that are missing, and says which.
# sudo is used only if something is missing and this is not root.
set -euo pipefail

case "${1:?stage: build, test or fuzz}" in
  build) packages=(g++ cmake ninja-build ccache pkg-config nlohmann-json3-dev libsimdjson-dev
                   libpcre2-dev libcli11-dev libicu-dev libgtest-dev libgmock-dev libbenchmark-dev) ;;
  test) packages=(clang-format git)
        command -v node > /dev/null && command -v npm > /dev/null || packages+=(nodejs npm) ;;
  fuzz) packages=(clang-14 libclang-rt-14-dev) ;;
  *) echo "install_packages.sh: unknown stage '$1'" >&2; exit 2 ;;
esac

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q 'install ok installed' ||
    missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

echo "installing Debian packages: ${missing[*]}"
run=()
[ "$(id -u)" -eq 0 ] || run=(sudo)
"${run[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${run[@]}" apt-get install -y -qq --no-install-recommends \
  "${missing[@]}" > /dev/null
