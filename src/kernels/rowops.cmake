# Everything that works row by row: norms, attention, router, embedding.
set(rowops_sources)
macro(nibble_rowops_tests)
endmacro()
