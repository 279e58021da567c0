# Products: repacking, matmul and the feed-forward block.
set(matmul_sources repack/repack.cc matmul/matmul.cc moe/expert_groups.cc moe/moe.cc)
macro(nibble_matmul_tests)
  nibble_test(repack/repack_test.cc DEPS kernels)
  nibble_test(matmul/matmul_test.cc DEPS kernels)
  nibble_test(moe/moe_test.cc DEPS kernels)
  nibble_bench(matmul/matmul_bench.cc DEPS kernels)
  nibble_bench(matmul/scales_bench.cc DEPS kernels)
endmacro()
