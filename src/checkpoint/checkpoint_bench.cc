// Opening a checkpoint of 300,000 tensors in 100 shards with an index: what a user waits for before
// anything else happens. Headers only; tensor data is a sparse hole of the files.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint_index.h"

namespace {

namespace fs = std::filesystem;
constexpr int kShards = 100;
constexpr int kTensorsPerShard = 3000;

std::string tensor_name(int i) {
  return "model.layers." + std::to_string(i / 3200) + ".mlp.experts." + std::to_string(i % 400) +
         ".down_proj.weight_scale_" + std::to_string(i % 3200 / 400);
}

std::string write_checkpoint() {
  const fs::path folder =
      fs::temp_directory_path() / ("checkpoint_bench-" + std::to_string(::getpid()));
  fs::create_directories(folder);
  std::ofstream index(folder / "model.safetensors.index.json");
  index << "{\"metadata\":{\"total_size\":0},\"weight_map\":{";
  for (int shard = 0; shard < kShards; ++shard) {
    const std::string name = "model-" + std::to_string(shard) + ".safetensors";
    std::string header = "{";
    constexpr int64_t kBytes = 1536 * 512;
    for (int i = 0; i < kTensorsPerShard; ++i) {
      const std::string tensor = tensor_name(shard * kTensorsPerShard + i);
      header += (i > 0 ? ",\"" : "\"") + tensor +
                R"(":{"dtype":"U8","shape":[1536,512],"data_offsets":[)" +
                std::to_string(i * kBytes) + "," + std::to_string((i + 1) * kBytes) + "]}";
      index << (shard + i > 0 ? ",\n\"" : "\"") << tensor << "\":\"" << name << '"';
    }
    header += "}";
    std::ofstream file(folder / name, std::ios::binary);
    for (int i = 0; i < 8; ++i) file.put(static_cast<char>((header.size() >> (8 * i)) & 0xFF));
    file << header;
    file.close();
    fs::resize_file(folder / name, 8 + header.size() + kTensorsPerShard * kBytes);
  }
  index << "}}";
  return folder.string();
}

void BM_Open300kTensors(benchmark::State& state) {
  const std::string folder = write_checkpoint();
  for (auto _ : state) {
    const auto index = nibble::checkpoint::CheckpointIndex::open(folder);
    if (!index || index->tensors().size() != size_t{kShards} * kTensorsPerShard) {
      state.SkipWithError(index ? "tensors are missing" : index.error().message().c_str());
      break;
    }
  }
  fs::remove_all(folder);
}
BENCHMARK(BM_Open300kTensors)->Unit(benchmark::kMillisecond)->MinTime(3.0);

}  // namespace

BENCHMARK_MAIN();
