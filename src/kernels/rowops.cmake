# Everything that works row by row: norms, attention, router, embedding.
set(rowops_sources
  norm/norm.cc
  attention/attention.cc attention/attention_prepare.cc
  router/router.cc
  embed/embed.cc)
macro(nibble_rowops_tests)
  foreach(test norm/norm_test.cc attention/attention_test.cc attention/attention_prepare_test.cc
          router/router_test.cc embed/embed_test.cc)
    nibble_test(${test} DEPS kernels)
  endforeach()
  nibble_bench(attention/attention_bench.cc DEPS kernels)
endmacro()
