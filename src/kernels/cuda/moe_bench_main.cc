// main of moe_cuda_bench: the table of moe_bench.h without the rest of nibble.
//   moe_cuda_bench [--shape qwen|glm|tp8|gptoss|a3b|E,H,I,K] [--format nvfp4|...|gate_up+down]
//                  [--rows 1,2,4,...] [--geometry auto|few|slices|small|narrow|wide]
//                  [--scales plain|csf|both]
#include <cstdlib>
#include <iostream>
#include <sstream>

#include "kernels/cuda/moe_bench.h"

int main(int argc, char** argv) {
  nibble::kernels::cuda::MoeBenchOptions options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--shape") options.shape = value;
    if (key == "--format") options.format = value;
    if (key == "--geometry") options.geometry = value;
    if (key == "--scales") options.scales = {value};
    if (key == "--scales" && value == "both") options.scales = {"plain", "csf"};
    if (key == "--rows") {
      options.rows.clear();
      std::istringstream list(value);
      for (std::string item; std::getline(list, item, ',');) {
        options.rows.push_back(std::atoll(item.c_str()));
      }
    }
  }
  const auto report = nibble::kernels::cuda::bench_moe(options, [&](const auto& so_far) {
    nibble::kernels::cuda::print_moe_progress(options, so_far, std::cout);
  });
  if (report.has_value()) return 0;
  std::cerr << report.error().message() << '\n';
  return 1;
}
