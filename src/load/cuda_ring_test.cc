// The loading ring against a stand-in for the CUDA runtime, whose streams are threads that come
// late. So the order of reading, copying and reuse is tested on any machine, and under the thread
// sanitizer.
#include "load/cuda_ring.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>

#include "load/cuda_stand_in_testing.h"
#include "recipe/tiny_checkpoint_testing.h"

namespace nibble::load {
namespace {

using recipe::WeightKey;

struct Opened {
  testing::TempDir dir;
  std::unique_ptr<recipe::Recipe> recipe;
};

std::unique_ptr<Opened> open_tiny() {
  auto opened = std::make_unique<Opened>();
  const testing::TinyOptions tiny;
  testing::write_tiny(opened->dir.path(), testing::tiny_tensors(tiny), testing::tiny_config(tiny));
  opened->recipe =
      std::make_unique<recipe::Recipe>(std::move(recipe::read_recipe(opened->dir.path()).value()));
  return opened;
}

plan::CudaStaging staging(int64_t slot_bytes, int slots, int64_t chunk_bytes) {
  plan::CudaStaging out;
  out.slot_bytes = slot_bytes;
  out.slots = slots;
  out.chunk_bytes = chunk_bytes;
  return out;
}

/// What `read` must put at its place.
std::vector<std::byte> expected(const recipe::Recipe& recipe, const RingRead& read) {
  const bool codes = read.part == RingRead::Part::kCodes;
  const recipe::Plane& plane = codes ? read.weight->codes : read.weight->scales;
  std::vector<std::byte> bytes(static_cast<size_t>(codes ? read.bytes : plane.bytes));
  recipe.index().read(*plane.tensor, plane.begin + (codes ? read.begin : 0), bytes).value();
  if (read.part != RingRead::Part::kScalesF32) return bytes;
  std::vector<std::byte> wide(static_cast<size_t>(read.bytes));
  for (int64_t i = 0; i < read.bytes / 4; ++i) {
    const float value = formats::scale_value(read.weight->meta.scale_kind, bytes.data(), i);
    std::memcpy(wide.data() + 4 * i, &value, 4);
  }
  return wide;
}

/// Requests of up to five random reads each: part of a weight's codes, its scales, or these
/// widened.
std::vector<std::vector<RingRead>> random_requests(const recipe::Recipe& recipe, int count,
                                                   int64_t slot_bytes, std::mt19937& random) {
  std::vector<std::pair<WeightKey, const recipe::Weight*>> weights;
  for (const auto& [key, weight] : recipe.weights()) weights.emplace_back(key, &weight);
  std::vector<std::vector<RingRead>> requests(static_cast<size_t>(count));
  for (std::vector<RingRead>& reads : requests) {
    int64_t at = 0;
    while (reads.size() < 5) {
      const auto& [key, weight] = weights[random() % weights.size()];
      RingRead read{key, weight, RingRead::Part::kCodes, 0, weight->codes.bytes, at};
      if (weight->scales.tensor != nullptr && random() % 2 == 0) {
        read.part = random() % 3 == 0 ? RingRead::Part::kScalesF32 : RingRead::Part::kScales;
        read.bytes = weight->scales.bytes * (read.part == RingRead::Part::kScales ? 1 : 4);
      } else if (random() % 2 == 0) {
        read.begin = static_cast<int64_t>(random()) % read.bytes;
        read.bytes -= read.begin;
      }
      if (at + read.bytes > slot_bytes) break;
      at += (read.bytes + 15) / 16 * 16;
      reads.push_back(read);
    }
  }
  return requests;
}

// Enqueued in bursts, taken in between, as the loader does; with chunks that hold several reads,
// and with chunks smaller than a scale plane.
TEST(CudaRing, SlotsArriveInOrderWithTheirBytes) {
  const std::unique_ptr<Opened> opened = open_tiny();
  const recipe::Recipe& recipe = *opened->recipe;
  constexpr int64_t kSlot = 256 << 10;
  std::mt19937 random(3);
  stand_in_delay_us = 20;
  for (const auto& [slots, chunk] :
       {std::pair(1, 64 << 10), std::pair(2, 4 << 10), std::pair(4, 1000), std::pair(8, 1 << 20)}) {
    SCOPED_TRACE(cat(slots, " slots, chunks of ", chunk));
    ThreadPool pool(3);
    const std::unique_ptr<CudaRing> ring =
        std::move(CudaRing::create(recipe.index(), pool, staging(kSlot, slots, chunk)).value());
    EXPECT_EQ(ring->host_bytes(), 2 * 3 * chunk);  // one thread is the caller's
    const std::vector<std::vector<RingRead>> requests = random_requests(recipe, 60, kSlot, random);
    std::vector<std::vector<std::byte>> results;
    size_t next = 0;
    for (size_t taken = 0; taken < requests.size(); ++taken) {
      while (next < requests.size() && (next == taken || next < taken + random() % 12)) {
        ring->enqueue(requests[next++], kSlot);
      }
      const Result<std::byte*> staged = ring->take();
      ASSERT_TRUE(staged) << staged.error().message();
      results.emplace_back(static_cast<size_t>(kSlot));
      queue_on(ring->stream(), [from = *staged, to = results.back().data()] {
        std::memcpy(to, from, static_cast<size_t>(kSlot));
      });
    }
    ASSERT_TRUE(ring->finish());
    EXPECT_TRUE(ring->idle());
    EXPECT_GT(ring->reading_seconds(), 0);
    for (size_t i = 0; i < requests.size(); ++i) {
      for (const RingRead& read : requests[i]) {
        const std::vector<std::byte> want = expected(recipe, read);
        ASSERT_EQ(std::memcmp(results[i].data() + read.at, want.data(), want.size()), 0)
            << "request " << i << ", " << key_text(read.key);
      }
    }
  }
  stand_in_delay_us = 0;
}

// A copy moves what lies together, as much as a chunk holds.
TEST(CudaRing, NeighboursShareAChunk) {
  const std::unique_ptr<Opened> opened = open_tiny();
  const recipe::Recipe& recipe = *opened->recipe;
  const auto& [key, weight] = *recipe.weights().find({1, recipe::Role::kExpertUp, 2});
  const int64_t codes = weight.codes.bytes, scales = weight.scales.bytes;
  for (const auto& [chunk, expected_copies] :
       {std::pair(4 * codes, 1), std::pair(codes, 3), std::pair(codes / 2 + 16, 5)}) {
    ThreadPool pool(1);
    const std::unique_ptr<CudaRing> ring =
        std::move(CudaRing::create(recipe.index(), pool, staging(1 << 20, 2, chunk)).value());
    copies = waits = 0;
    std::vector<RingRead> reads;
    int64_t at = 0;
    for (int i = 0; i < 2; ++i) {
      reads.push_back({key, &weight, RingRead::Part::kScales, 0, scales, at});
      reads.push_back({key, &weight, RingRead::Part::kCodes, 0, codes, at + scales});
      at += scales + codes;
    }
    ring->enqueue(reads, at);
    ASSERT_TRUE(ring->take());
    EXPECT_EQ(copies, expected_copies) << "chunks of " << chunk;
    EXPECT_LE(waits, std::max(0, expected_copies - 1));
  }
}

TEST(CudaRing, AFailedReadIsTheTakersErrorAndEndsCleanly) {
  const std::unique_ptr<Opened> opened = open_tiny();
  const recipe::Recipe& recipe = *opened->recipe;
  const auto& [key, weight] = *recipe.weights().find({0, recipe::Role::kExpertGate, 1});
  ThreadPool pool(2);
  const std::unique_ptr<CudaRing> ring =
      std::move(CudaRing::create(recipe.index(), pool, staging(1 << 20, 2, 4096)).value());
  recipe::Weight bad = weight;
  std::filesystem::resize_file(opened->dir.path() + "/model.safetensors", 4096);
  for (int i = 0; i < 5; ++i) {
    ring->enqueue({{key, &bad, RingRead::Part::kCodes, 0, bad.codes.bytes, 0}}, bad.codes.bytes);
  }
  const Result<std::byte*> staged = ring->take();
  ASSERT_FALSE(staged);
  EXPECT_EQ(staged.error().code(), Code::kCorruptInput);
  EXPECT_NE(staged.error().message().find("model.safetensors"), std::string::npos);
}

// Whatever thread meets its fault first.
TEST(CudaRing, TheFirstFaultInOrderIsReported) {
  testing::TempDir dir;
  const testing::TinyOptions tiny;
  testing::TinyTensors tensors = testing::tiny_tensors(tiny);
  for (const int expert : {2, 5, 6}) {
    tensors.at(cat("model.layers.0.mlp.experts.", expert, ".up_proj.weight_scale")).bytes[3] =
        std::byte{0x7F};
  }
  testing::write_tiny(dir.path(), tensors, testing::tiny_config(tiny));
  const recipe::Recipe recipe = std::move(recipe::read_recipe(dir.path()).value());
  for (int turn = 0; turn < 20; ++turn) {
    ThreadPool pool(4);
    const std::unique_ptr<CudaRing> ring =
        std::move(CudaRing::create(recipe.index(), pool, staging(1 << 20, 2, 2048)).value());
    std::vector<RingRead> reads;
    int64_t at = 0;
    for (int32_t e = 0; e < 8; ++e) {
      const auto& [key, weight] = *recipe.weights().find({0, recipe::Role::kExpertUp, e});
      reads.push_back({key, &weight, RingRead::Part::kScales, 0, weight.scales.bytes, at});
      at += weight.scales.bytes;
    }
    ring->enqueue(std::move(reads), at);
    const Result<std::byte*> staged = ring->take();
    ASSERT_FALSE(staged);
    EXPECT_NE(staged.error().message().find("layer 0 expert 2 up"), std::string::npos)
        << staged.error().message();
  }
}

// The quick look at scales says what the recipe's check says, wherever a strange byte lies.
TEST(CudaRing, ScalesAreJudgedAsTheRecipeDoes) {
  for (const formats::FormatId format : {formats::FormatId::kNvfp4, formats::FormatId::kMxfp4}) {
    SCOPED_TRACE(formats::block_format(format).name);
    testing::TempDir dir;
    testing::TinyOptions tiny;
    tiny.inner = 96;  // planes of 96 x 16 or 96 x 8 bytes
    tiny.experts = 16;
    tiny.format = [format](const std::string& module) {
      return testing::tiny_is_mlp(module) ? format : formats::FormatId::kBf16;
    };
    testing::TinyTensors tensors = testing::tiny_tensors(tiny);
    const uint8_t strange[] = {0x00, 0x01, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF};
    int number = 0;
    for (auto& [name, tensor] : tensors) {
      if (!name.ends_with(".weight_scale") || name.find("experts.") == std::string::npos) continue;
      const size_t last = tensor.bytes.size() - 1, places[] = {0, 7, 8, 100, last};
      if (number % 41 == 40) std::fill(tensor.bytes.begin(), tensor.bytes.end(), std::byte{0});
      tensor.bytes[places[number / 8 % 5]] = std::byte{strange[number % 8]};
      ++number;
    }
    ASSERT_GT(number, 80);
    testing::write_tiny(dir.path(), tensors, testing::tiny_config(tiny));
    const recipe::Recipe recipe = std::move(recipe::read_recipe(dir.path()).value());
    int good = 0, bad = 0;
    ThreadPool pool(2);
    for (const auto& [key, weight] : recipe.weights()) {
      if (key.expert < 0 || weight.scales.tensor == nullptr) continue;
      const RingRead read{key, &weight, RingRead::Part::kScales, 0, weight.scales.bytes, 0};
      const Result<void> want = recipe::check_scales(key, weight, expected(recipe, read));
      const std::unique_ptr<CudaRing> ring =
          std::move(CudaRing::create(recipe.index(), pool, staging(8192, 2, 4096)).value());
      ring->enqueue({read}, read.bytes);
      const Result<std::byte*> got = ring->take();
      ASSERT_EQ(got.has_value(), want.has_value()) << key_text(key);
      if (!want) {
        EXPECT_EQ(got.error().message(), want.error().message());
      }
      ++(want ? good : bad);
    }
    EXPECT_GT(good, 10);
    EXPECT_GT(bad, 10);
  }
}

TEST(CudaRing, EndsWithWorkStillEnqueued) {
  const std::unique_ptr<Opened> opened = open_tiny();
  const recipe::Recipe& recipe = *opened->recipe;
  const auto& [key, weight] = *recipe.weights().find({1, recipe::Role::kExpertUp, 2});
  for (int taken = 0; taken < 4; ++taken) {
    ThreadPool pool(2);
    const std::unique_ptr<CudaRing> ring =
        std::move(CudaRing::create(recipe.index(), pool, staging(1 << 20, 2, 1000)).value());
    for (int i = 0; i < 9; ++i) {
      ring->enqueue({{key, &weight, RingRead::Part::kCodes, 0, weight.codes.bytes, 0}},
                    weight.codes.bytes);
    }
    for (int i = 0; i < taken; ++i) EXPECT_TRUE(ring->take());
  }
}

}  // namespace
}  // namespace nibble::load
