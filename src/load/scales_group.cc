#include "load/scales_group.h"

#include <algorithm>
#include <bit>
#include <tuple>

#include "recipe/module_name.h"

namespace nibble::load {
namespace {

using codec::CsfPlane;
using recipe::CsfFamily;

std::string projection_of(const std::string& module) {
  return module.substr(module.rfind('.') + 1);
}

bool is_projection(std::string_view name) {
  for (const std::string_view known : {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}) {
    if (name == known) return true;
  }
  return false;
}

/// The layer number if `module` is an expert's projection as `family` names it, else -1.
int64_t family_layer(const CsfFamily& family, std::string_view module) {
  if (!module.starts_with(family.head)) return -1;
  std::string_view rest = module.substr(family.head.size());
  const int64_t layer = recipe::leading_number(rest);
  rest.remove_prefix(std::min(rest.size(), cat(layer).size()));
  if (layer < 0 || !rest.starts_with(family.middle)) return -1;
  rest.remove_prefix(family.middle.size());
  const int64_t expert = recipe::leading_number(rest);
  rest.remove_prefix(std::min(rest.size(), cat(expert).size()));
  if (expert < 0 || !rest.starts_with('.') || !is_projection(rest.substr(1))) return -1;
  return layer;
}

bool suits(const CsfFamily& family, const QuantizedModule& module) {
  if (!module.fp4() || module.kind() != family.kind || module.expert >= 0) return false;
  return module.scale == cat(module.weight.name, family.scale) &&
         module.weight.codes.tensor->name == cat(module.weight.name, family.weight) &&
         family_layer(family, module.weight.name) >= 0;
}

/// Sizes of the first gate and the number of experts are the family's own.
bool same_sizes(const CsfFamily& family, const std::vector<const QuantizedModule*>& planes) {
  const formats::MatrixView& meta = planes.front()->weight.meta;
  int64_t experts = 0;
  for (const QuantizedModule* plane : planes) {
    experts = std::max(experts, recipe::module_numbers(plane->weight.name).expert + 1);
  }
  return experts == family.experts &&
         std::minmax({meta.rows, meta.cols}) == std::minmax({family.hidden, family.intermediate});
}

std::vector<const QuantizedModule*> fitting(const CsfFamily& family,
                                            const std::vector<QuantizedModule>& modules) {
  std::vector<const QuantizedModule*> out;
  for (const QuantizedModule& module : modules) {
    if (suits(family, module)) out.push_back(&module);
  }
  return out;
}

Result<const CsfFamily*> choose_family(const std::vector<QuantizedModule>& modules,
                                       const std::string& name) {
  const CsfFamily* first = nullptr;
  std::string known;
  for (const CsfFamily& family : recipe::csf_families()) {
    known += cat(known.empty() ? "" : ", ", family.name);
    if (!name.empty() && family.name != name) continue;
    const auto planes = fitting(family, modules);
    if (!planes.empty() && same_sizes(family, planes)) return &family;
    if (!planes.empty() && first == nullptr) first = &family;
  }
  if (first != nullptr) return first;
  if (!name.empty() && recipe::find_csf_family(name) == nullptr) {
    return Error(Code::kInvalidArgument, cat("family '", name, "' is unknown; known are ", known));
  }
  return Error(Code::kUnsupported, cat("no expert has the names of ", name.empty() ? known : name,
                                       ", the families a manifest container can hold"));
}

/// In order of names the planes of a module are neighbours.
void add_plane(ScalesSelection& out, const QuantizedModule& plane) {
  const std::string_view module = recipe::module_numbers(plane.weight.name).experts_module;
  if (out.modules.empty() || out.modules.back().name != module) {
    out.modules.push_back({std::string(module), {}});
  }
  out.modules.back().planes.push_back(&plane);
}

/// One plane encoded; geometry that the codec cannot take leaves `why`.
struct Encoded {
  std::optional<CsfPlane> stream;
  std::string why;
};

Result<Encoded> encode_plane(const checkpoint::CheckpointIndex& index,
                             const QuantizedModule& plane) {
  const recipe::PlaneShape shape = plane.shape();
  Encoded out;
  if (const auto fits = codec::check_csf_geometry(*plane.kind(), shape.rows, shape.cols); !fits) {
    out.why = fits.error().message();
    return out;
  }
  NIBBLE_TRY(const std::vector<std::byte> bytes, recipe::read_scale_plane(index, plane.weight));
  NIBBLE_TRY(out.stream, codec::encode_csf(*plane.kind(), shape.rows, shape.cols,
                                           std::span(reinterpret_cast<const uint8_t*>(bytes.data()),
                                                     bytes.size())));
  return out;
}

/// "" or why gate and up of one expert cannot share a compressed module.
std::string unequal_globals(const std::vector<const QuantizedModule*>& planes) {
  std::map<int64_t, uint32_t> gates;
  for (const QuantizedModule* plane : planes) {
    const std::string projection = projection_of(plane->weight.name);
    if (projection != "gate_proj" && projection != "up_proj") continue;
    const int64_t expert = recipe::module_numbers(plane->weight.name).expert;
    const auto bits = std::bit_cast<uint32_t>(plane->weight.meta.global);
    if (gates.emplace(expert, bits).first->second != bits) {
      return cat("gate and up of expert ", expert, " have different weight_scale_2");
    }
  }
  return {};
}

std::string growth(int64_t csf_bytes, int64_t plain_bytes) {
  return cat("would not shrink (", csf_bytes, " bytes for ", plain_bytes, ")");
}

/// Fills compressed and why_plain of every group.
void decide(std::vector<ScalesReport::Group>& groups, bool whole_module, std::string why_module) {
  int64_t plain = 0, csf = 0;
  for (ScalesReport::Group& group : groups) {
    plain += group.plain_bytes;
    csf += group.csf_bytes;
    if (why_module.empty()) why_module = group.why_plain;  // a plane that cannot be encoded
    if (whole_module || !group.why_plain.empty()) continue;
    group.compressed = group.csf_bytes < group.plain_bytes;
    if (!group.compressed) group.why_plain = growth(group.csf_bytes, group.plain_bytes);
  }
  if (!whole_module) return;
  if (why_module.empty() && csf >= plain) why_module = growth(csf, plain);
  for (ScalesReport::Group& group : groups) {
    group.compressed = why_module.empty();
    group.why_plain = why_module;
  }
}

}  // namespace

Result<ScalesSelection> select_modelopt(const std::vector<QuantizedModule>& modules) {
  ScalesSelection out;
  for (const QuantizedModule& module : modules) {
    const auto numbers = recipe::module_numbers(module.weight.name);
    if (module.weight.dialect != "modelopt nvfp4" || module.expert >= 0) continue;
    if (numbers.expert < 0 || !is_projection(projection_of(module.weight.name))) continue;
    add_plane(out, module);
  }
  if (out.modules.empty()) {
    return Error(Code::kUnsupported,
                 "no expert is stored in ModelOpt's NVFP4 form, the only one that declares csf");
  }
  return out;
}

Result<ScalesSelection> select_manifest(const std::vector<QuantizedModule>& modules,
                                        const std::string& family_name, int64_t layers) {
  NIBBLE_TRY(const CsfFamily* family, choose_family(modules, family_name));
  ScalesSelection out;
  out.family = std::string(family->name);
  const QuantizedModule* first = nullptr;
  for (const QuantizedModule* plane : fitting(*family, modules)) {
    if (layers > 0 && family_layer(*family, plane->weight.name) >= layers) continue;
    if (first == nullptr) first = plane;
    if (plane->weight.scales.tensor->dtype != first->weight.scales.tensor->dtype) continue;
    add_plane(out, *plane);
  }
  if (first == nullptr) {
    return Error(Code::kUnsupported, cat("no expert of '", family->name, "' lies in layers 0 to ",
                                         layers - 1, ", which are all a manifest compresses"));
  }
  return out;
}

Result<EncodedModule> encode_module(const checkpoint::CheckpointIndex& index,
                                    const ScalesSelection::Module& module, bool whole_module,
                                    ThreadPool& pool) {
  const auto count = static_cast<int64_t>(module.planes.size());
  std::vector<std::optional<Result<Encoded>>> encoded(module.planes.size());
  pool.parallel_for(count, [&](int64_t task, int) {
    const auto i = static_cast<size_t>(task);
    encoded[i] = encode_plane(index, *module.planes[i]);
  });
  std::map<std::string, ScalesReport::Group> by_projection;
  for (size_t i = 0; i < encoded.size(); ++i) {
    if (!*encoded[i]) return encoded[i]->error();
    const QuantizedModule& plane = *module.planes[i];
    const std::string projection = projection_of(plane.weight.name);
    ScalesReport::Group& group = by_projection[projection];
    group.module = module.name;
    group.projection = projection;
    ++group.planes;
    group.plain_bytes += plane.weight.scales.bytes;
    const Encoded& done = encoded[i]->value();
    if (!done.stream) {
      group.why_plain = done.why;
      group.csf_bytes += plane.weight.scales.bytes;
      continue;
    }
    group.csf_bytes += done.stream->view().stored_bytes();
    group.exceptions += done.stream->view().exception_count();
  }
  EncodedModule out;
  for (auto& [projection, group] : by_projection) out.groups.push_back(std::move(group));
  decide(out.groups, whole_module, whole_module ? unequal_globals(module.planes) : std::string());
  for (size_t i = 0; i < encoded.size(); ++i) {
    const std::string projection = projection_of(module.planes[i]->weight.name);
    const auto group = std::find_if(out.groups.begin(), out.groups.end(),
                                    [&](const auto& g) { return g.projection == projection; });
    if (!group->compressed) continue;
    out.streams.emplace(module.planes[i]->scale, std::move(*encoded[i]->value().stream));
  }
  return out;
}

}  // namespace nibble::load
