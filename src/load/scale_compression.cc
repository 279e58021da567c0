#include "load/scale_compression.h"

#include <mutex>

#include "recipe/scale_plane.h"

namespace nibble::load {

void ScaleReport::add(const plan::PlannedWeight& planned, const codec::CsfTiles& tiles) {
  ++planes;
  scales += tiles.rows * tiles.cols;
  plain_bytes += planned.planes.scales;
  csf_bytes += csf_resident_bytes(tiles);
  exceptions += static_cast<int64_t>(tiles.exceptions.size());
}

int64_t csf_resident_bytes(const codec::CsfTiles& tiles) {
  return static_cast<int64_t>(tiles.fixed.size() + 4 * tiles.exceptions.size() +
                              4 * tiles.exception_begin.size());
}

Result<codec::CsfTiles> encode_scales(const recipe::Recipe& recipe, const recipe::WeightKey& key) {
  const recipe::Weight& weight = plan::source_weight(recipe, key);
  NIBBLE_TRY(const std::vector<std::byte> plane, recipe::read_scale_plane(recipe.index(), weight));
  NIBBLE_TRY(recipe::check_scales(key, weight, plane));
  const bool nvfp4 = weight.meta.format == formats::FormatId::kNvfp4;
  NIBBLE_TRY(
      const codec::CsfPlane stored,
      codec::encode_csf(nvfp4 ? codec::CsfKind::kNvfp4 : codec::CsfKind::kMxfp4, weight.meta.rows,
                        static_cast<int64_t>(plane.size()) / weight.meta.rows,
                        {reinterpret_cast<const uint8_t*>(plane.data()), plane.size()}),
      key_text(key));
  return codec::stored_to_tiles(stored.view());
}

Result<std::vector<ScaleReport>> measure_scales(const recipe::Recipe& recipe,
                                                const plan::PrecisionPlan& plan, ThreadPool& pool) {
  std::vector<recipe::WeightKey> keys;
  for (const auto& [key, planned] : plan.weights) {
    if (planned.may_compress) keys.push_back(key);
  }
  std::map<std::pair<int32_t, recipe::Role>, ScaleReport> reports;
  std::mutex mutex;
  const auto measure = [&](int64_t i, int) -> Result<void> {
    const recipe::WeightKey& key = keys[static_cast<size_t>(i)];
    NIBBLE_TRY(const codec::CsfTiles tiles, encode_scales(recipe, key));
    std::lock_guard lock(mutex);
    ScaleReport& report = reports[{key.layer, key.role}];
    report.layer = key.layer;
    report.role = key.role;
    report.add(plan.weights.at(key), tiles);
    return {};
  };
  NIBBLE_TRY(pool.try_parallel_for(static_cast<int64_t>(keys.size()), measure));
  std::vector<ScaleReport> list;
  for (const auto& [id, report] : reports) list.push_back(report);
  return list;
}

}  // namespace nibble::load
