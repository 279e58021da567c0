// main of every *_cuda_check program. NIBBLE_CHECK_KERNELS, from the build, names its kernels.
//   X_cuda_check [small|usual] [KERNEL or FORMAT ...]
// `small` is for compute-sanitizer. Exit code 0: all passed, 1: not, 2: usage, 77: no GPU.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <iostream>
#include <sstream>
#include <vector>

#include "kernels/cuda/checks.h"

namespace {

using namespace nibble::kernels::cuda;

bool contains(const std::vector<std::string>& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> kernels, wanted;
  std::istringstream list(NIBBLE_CHECK_KERNELS);
  for (std::string name; std::getline(list, name, ',');) kernels.push_back(name);
  CheckOptions options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "small" || word == "quick") {
      options.size = CheckSize::kQuick;
    } else if (word == "usual") {
      options.size = CheckSize::kUsual;
    } else {
      wanted.push_back(word);
    }
  }
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    std::cout << "skipped, no usable NVIDIA GPU: " << cudaGetErrorString(error) << '\n';
    return 77;
  }
  CheckSummary all;
  for (const KernelCheck& check : kernel_checks()) {
    if (!contains(kernels, check.kernel)) continue;
    if (!wanted.empty() && !contains(wanted, check.kernel) && !contains(wanted, check.format)) {
      continue;
    }
    options.format = check.format;
    all.add(check.run(options, std::cout));
  }
  std::cout << all.checks << " checks, " << all.failed << " failed\n";
  if (all.checks == 0) return 2;
  return all.failed == 0 ? 0 : 1;
}
