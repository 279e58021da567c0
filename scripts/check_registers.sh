#!/usr/bin/env bash
# Registers of a decode step's kernels on sm_90a, as nvcc reports them. They decide which kernels share a
# processor, and so when the next one can start: one step beyond a bound here costs microseconds a layer
# (docs/results/cuda-model-h200.md), and no other test would see it. Nor that the experts' kernels for more
# rows, whose sums fill the registers, spill.
#   check_registers.sh NVCC [LAUNCHER]
set -euo pipefail
cd "$(dirname "$0")/.."
nvcc=$1
launcher=${2:-}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# One line a kernel: registers, bytes spilled, name.
compile() {
  $launcher "$nvcc" -std=c++20 -O3 -DNDEBUG -Isrc -gencode arch=compute_90a,code=sm_90a -Xptxas -v \
    -c "src/kernels/cuda/$1.cu" -o "$out/$1.o" > "$out/$1.log" 2>&1 || true
  c++filt < "$out/$1.log" | awk '
    /Compiling entry function/ { name = $0; sub(/.*Compiling entry function ./, "", name)
                                 sub(/\([A-Za-z:]*\). for .*/, "", name); gsub(/nibble::(kernels::cuda|formats)::/, "", name) }
    /bytes spill stores/ { spilled = $0; sub(/ bytes spill stores.*/, "", spilled); sub(/.* /, "", spilled) }
    / Used [0-9]+ registers/ { used = $0; sub(/.* Used /, "", used); sub(/ registers.*/, "", used)
                               print used, spilled, name }' > "$out/$1.txt"
}
sources=(moe_few_fp4 moe_stream_nvfp4 router linear_bf16 attention_bf16)
for s in "${sources[@]}"; do compile "$s" & done
wait

failed=0
# What, source, pattern of the names, how many kernels, fewest and most registers. None may spill.
check() {
  local found
  found=$(grep -E "$3" "$out/$2.txt" || true)
  if [ "$(grep -c . <<< "$found")" -ne "$4" ]; then
    echo "$1: $4 kernels '$3' expected in $2.cu, found:"; echo "$found"
    head -20 "$out/$2.log"; failed=1; return
  fi
  while read -r used spilled name; do
    local verdict=ok
    if [ "$used" -lt "$5" ] || [ "$used" -gt "$6" ] || [ "$spilled" -ne 0 ]; then
      verdict="FAILED"; failed=1
    fi
    echo "$verdict: $used registers ($5 to $6), $spilled bytes spilled, $1: $name"
  done <<< "$found"
}
check 'experts, few slots, beside the router' moe_few_fp4 'moe_few_kernel<.*, true> >' 4 1 80
check 'router, beside the experts' router 'norm_route_kernel<.*, 2, 16> >' 2 1 48
check 'held product, beside the experts' linear_bf16 'linear_held_kernel' 1 1 64
check 'attention, alone on its processor' attention_bf16 'attention_cluster_kernel<.*, true>' 2 65 80
check 'attention, two on a processor' attention_bf16 'attention_cluster_kernel<.*, false>' 2 1 64
check 'experts, many rows, sums in registers' moe_stream_nvfp4 'moe_stream_kernel<.*, false, 4, 128, ' 2 96 96
check 'experts, some rows, two on a processor' moe_stream_nvfp4 'moe_stream_kernel<.*, true, 2, 16, 4, 2, ' 2 1 96
exit $failed
