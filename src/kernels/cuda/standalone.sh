#!/bin/sh
# Builds moe_cuda_check and moe_cuda_bench with nothing but nvcc and a C++ compiler: for a GPU machine
# without the project's other dependencies. Usage: standalone.sh OUT_DIR [nvcc flags]
set -e
src=$(cd "$(dirname "$0")/../.." && pwd)
out=$1
shift
mkdir -p "$out"
flags="-std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -I$src $*"
pids=""
for f in "$src"/kernels/cuda/*.cu; do
  nvcc $flags -c "$f" -o "$out/$(basename "$f" .cu).o" >"$out/$(basename "$f" .cu).log" 2>&1 &
  pids="$pids $!"
done
for f in dtype element packing block_format decode_rows; do
  g++ -std=c++20 -O2 -I"$src" -c "$src/formats/$f.cc" -o "$out/formats_$f.o" &
  pids="$pids $!"
done
g++ -std=c++20 -O2 -I"$src" -c "$src/base/result.cc" -o "$out/base_result.o" &
pids="$pids $!"
for p in $pids; do wait "$p" || { cat "$out"/*.log; exit 1; }; done
common=$(ls "$out"/*.o | grep -v moe_cuda_)
nvcc -o "$out/moe_cuda_check" "$out/moe_cuda_check.o" $common
nvcc -o "$out/moe_cuda_bench" "$out/moe_cuda_bench.o" $common
