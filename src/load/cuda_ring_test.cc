// The loading ring against a stand-in for the CUDA runtime in this file: copies happen at once,
// events are counters. So the order of reading, copying and reuse is tested on any machine, and
// under the thread sanitizer.
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

/// What `read` must put at its place.
std::vector<std::byte> expected(const recipe::Recipe& recipe, const RingRead& read) {
  const bool codes = read.part == RingRead::Part::kCodes;
  const recipe::Plane& plane = codes ? read.weight->codes : read.weight->scales;
  std::vector<std::byte> bytes(static_cast<size_t>(read.bytes));
  recipe.index().read(*plane.tensor, plane.begin + (codes ? read.begin : 0), bytes).value();
  return bytes;
}

TEST(CudaRing, SlotsArriveInOrderWithTheirBytes) {
  const std::unique_ptr<Opened> opened = open_tiny();
  const recipe::Recipe& recipe = *opened->recipe;
  std::vector<std::pair<WeightKey, const recipe::Weight*>> weights;
  for (const auto& [key, weight] : recipe.weights()) weights.emplace_back(key, &weight);
  std::mt19937 random(3);
  for (const int slots : {1, 2, 4}) {
    copies = waits = 0;
    ThreadPool pool(2);
    constexpr int64_t kSlot = 256 << 10;
    const std::unique_ptr<CudaRing> ring =
        std::move(CudaRing::create(recipe.index(), pool, kSlot, slots).value());
    std::vector<std::vector<RingRead>> requests;
    for (int i = 0; i < 60; ++i) {
      std::vector<RingRead> reads;
      int64_t at = 0;
      while (reads.size() < 5) {
        const auto& [key, weight] = weights[random() % weights.size()];
        RingRead read{key, weight, RingRead::Part::kCodes, 0, weight->codes.bytes, at};
        if (weight->scales.tensor != nullptr && random() % 2 == 0) {
          read.part = RingRead::Part::kScales;
          read.bytes = weight->scales.bytes;
        }
        if (at + read.bytes > kSlot) break;
        at += (read.bytes + 15) / 16 * 16;
        reads.push_back(read);
      }
      requests.push_back(reads);
    }
    // Enqueued in bursts, taken in between, as the loader does.
    size_t next = 0;
    for (size_t taken = 0; taken < requests.size(); ++taken) {
      while (next < requests.size() && next < taken + 1 + random() % 7) {
        ring->enqueue(requests[next++], kSlot);
      }
      if (next == taken) ring->enqueue(requests[next++], kSlot);
      const Result<std::byte*> staged = ring->take();
      ASSERT_TRUE(staged) << staged.error().message();
      for (const RingRead& read : requests[taken]) {
        const std::vector<std::byte> want = expected(recipe, read);
        ASSERT_EQ(std::memcmp(*staged + read.at, want.data(), want.size()), 0)
            << slots << " slots, request " << taken;
      }
    }
    EXPECT_EQ(copies, static_cast<int>(requests.size()));
    EXPECT_EQ(waits, static_cast<int>(requests.size()) - slots);  // each reuse of a slot
    EXPECT_TRUE(ring->finish());
  }
}

TEST(CudaRing, AFailedReadIsTheTakersErrorAndEndsCleanly) {
  const std::unique_ptr<Opened> opened = open_tiny();
  const recipe::Recipe& recipe = *opened->recipe;
  const auto& [key, weight] = *recipe.weights().find({0, recipe::Role::kExpertGate, 1});
  ThreadPool pool(2);
  const std::unique_ptr<CudaRing> ring =
      std::move(CudaRing::create(recipe.index(), pool, 1 << 20, 2).value());
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

TEST(CudaRing, EndsWithWorkStillEnqueued) {
  const std::unique_ptr<Opened> opened = open_tiny();
  const recipe::Recipe& recipe = *opened->recipe;
  const auto& [key, weight] = *recipe.weights().find({1, recipe::Role::kExpertUp, 2});
  for (int taken = 0; taken < 4; ++taken) {
    ThreadPool pool(2);
    const std::unique_ptr<CudaRing> ring =
        std::move(CudaRing::create(recipe.index(), pool, 1 << 20, 2).value());
    for (int i = 0; i < 9; ++i) {
      ring->enqueue({{key, &weight, RingRead::Part::kCodes, 0, weight.codes.bytes, 0}},
                    weight.codes.bytes);
    }
    for (int i = 0; i < taken; ++i) EXPECT_TRUE(ring->take());
  }
}

}  // namespace
}  // namespace nibble::load
