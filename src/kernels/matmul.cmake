# Products: repacking, matmul and the feed-forward block.
set(matmul_sources)
macro(nibble_matmul_tests)
endmacro()
