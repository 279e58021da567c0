// nibble inspect DIR: what the checkpoint is and what it needs. Reads headers and scalars only.
#include <algorithm>
#include <iomanip>
#include <map>
#include <optional>
#include <ostream>
#include <set>
#include <tuple>

#include "base/file.h"
#include "base/json.h"
#include "cli/command.h"
#include "cli/inspect_scales.h"
#include "cli/session.h"
#include "model/model.h"
#include "plan/cuda_plan.h"

namespace nibble::cli {
namespace {

struct Options {
  std::string directory, activations = "bf16", scales = "plain", device = "cpu", html;
  int64_t ranks = 1, context = 0;
  bool json = false;
};

using recipe::Role;

// The part of the model a role belongs to, as the table prints it.
std::string part_of(const recipe::WeightKey& key, int64_t layers) {
  const std::string mtp = key.layer >= layers ? "MTP " : "";
  switch (key.role) {
    case Role::kExpertGate: return mtp + "expert gate";
    case Role::kExpertUp: return mtp + "expert up";
    case Role::kExpertDown: return mtp + "expert down";
    case Role::kSharedGate:
    case Role::kSharedUp:
    case Role::kSharedDown: return mtp + "shared expert";
    case Role::kDenseGate:
    case Role::kDenseUp:
    case Role::kDenseDown: return mtp + "dense MLP";
    case Role::kRouter:
    case Role::kRouterBias: return mtp + "router";
    case Role::kQ:
    case Role::kK:
    case Role::kV:
    case Role::kO: return mtp + "attention";
    case Role::kEmbedding: return "embedding";
    case Role::kHead: return "head";
    case Role::kMtpProjection: return "MTP projection";
    case Role::kMtpEmbedding: return "MTP embedding";
    case Role::kMtpHead: return "MTP head";
    default: return mtp + "norms and biases";
  }
}

struct Row {
  std::string part, format, dialect, shape;
  int64_t count = 0, stored_bytes = 0, resident_bytes = 0;
};

std::vector<Row> table(const recipe::Recipe& recipe, const plan::PrecisionPlan& plan) {
  std::map<std::tuple<std::string, std::string, std::string, std::string>, Row> rows;
  for (const auto& [key, weight] : recipe.weights()) {
    const auto planned = plan.weights.find(key);
    const std::string part = part_of(key, recipe.config().layers);
    const std::string format(formats::block_format(weight.meta.format).name);
    const bool vector = plan::is_vector(key.role);
    // Vectors of many shapes make one line.
    const std::string shape = vector ? "" : cat('[', weight.meta.rows, ", ", weight.meta.cols, ']');
    Row& row = rows[{part, format, weight.dialect, shape}];
    row.part = part;
    row.format = format;
    row.dialect = weight.dialect;
    row.shape = shape;
    ++row.count;
    row.stored_bytes += weight.codes.bytes + weight.stored_scale_bytes();
    if (planned != plan.weights.end()) row.resident_bytes += planned->second.resident_bytes();
  }
  std::vector<Row> list;
  for (auto& [id, row] : rows) list.push_back(std::move(row));
  std::stable_sort(list.begin(), list.end(),
                   [](const Row& a, const Row& b) { return a.stored_bytes > b.stored_bytes; });
  return list;
}

void print_table(std::ostream& out, const std::vector<Row>& rows) {
  Row total;
  out << std::left << std::setw(22) << "part" << std::setw(13) << "format" << std::setw(26)
      << "dialect" << std::setw(18) << "shape" << std::right << std::setw(8) << "count"
      << std::setw(11) << "stored" << std::setw(11) << "resident" << '\n';
  const auto line = [&out](const Row& r) {
    out << std::left << std::setw(22) << r.part << std::setw(13) << r.format << std::setw(26)
        << r.dialect << std::setw(18) << r.shape << std::right << std::setw(8) << r.count
        << std::setw(11) << bytes_text(r.stored_bytes) << std::setw(11)
        << bytes_text(r.resident_bytes) << '\n';
  };
  for (const Row& row : rows) {
    line(row);
    total.count += row.count;
    total.stored_bytes += row.stored_bytes;
    total.resident_bytes += row.resident_bytes;
  }
  total.part = "total";
  line(total);
}

// Layers whose experts do not all share one format, and the formats that occur.
std::string expert_formats(const plan::PrecisionPlan& plan) {
  std::set<std::string> names;
  std::map<int32_t, int> groups;
  for (const plan::ExpertGroup& g : plan.groups) {
    const auto name = [](formats::FormatId id) { return formats::block_format(id).name; };
    names.insert(g.gate == g.up && g.up == g.down
                     ? std::string(name(g.gate))
                     : cat(name(g.gate), '/', name(g.up), '/', name(g.down)));
    ++groups[g.layer];
  }
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  const auto mixed =
      std::count_if(groups.begin(), groups.end(), [](const auto& g) { return g.second > 1; });
  if (mixed > 0) text += cat(" (", mixed, " layers mix)");
  return text.empty() ? "none" : text;
}

void print_weights(std::ostream& out, const std::map<std::string, int64_t>& by_format) {
  for (const auto& [format, bytes] : by_format) {
    out << "  weights " << std::left << std::setw(12) << format << std::right << std::setw(11)
        << bytes_text(bytes) << '\n';
  }
}
void print_bytes(std::ostream& out, const std::string& name, int64_t bytes,
                 const std::string& note) {
  out << "  " << std::left << std::setw(20) << name << std::right << std::setw(11)
      << bytes_text(bytes) << (note.empty() ? "" : "  ") << note << '\n';
}
void print_kv(std::ostream& out, int64_t bytes, int64_t per_token, int64_t context) {
  print_bytes(out, "KV cache", bytes, cat(per_token, " bytes per token x ", context, " tokens"));
}

/// Of one GPU. A step's workspace, which depends on the batch, comes on top.
void print_plan(std::ostream& out, const plan::CudaPlan& plan) {
  out << "\nmemory plan (one CUDA GPU)\n";
  print_weights(out, plan.weights_by_format);
  print_bytes(out, "weights in all", plan.weights_bytes, "plain scales; no MTP layer");
  print_kv(out, plan.kv_bytes, plan.kv_bytes_per_token, plan.options.max_context);
  print_bytes(out, "staging peak", plan.device_staging_bytes, "while loading");
  print_bytes(out, "needed in all",
              plan.weights_bytes + std::max(plan.kv_bytes, plan.device_staging_bytes),
              "and a step's workspace");
  print_bytes(out, "host staging", plan.host_staging_bytes, "page-locked, while loading");
}

void print_plan(std::ostream& out, const plan::PrecisionPlan& plan, int64_t workspace) {
  const plan::MemoryPlan& m = plan.memory;
  out << "\nmemory plan"
      << (plan.options.ranks > 1 ? cat(" of each of ", plan.options.ranks, " ranks")
                                 : std::string())
      << " (CPU)\n";
  print_weights(out, m.weights_by_format);
  print_bytes(out, "weights in all", m.weights_bytes,
              m.mtp_bytes > 0 ? cat("MTP ", bytes_text(m.mtp_bytes)) : "");
  print_kv(out, m.kv_bytes, m.kv_bytes_per_token, plan.options.max_context);
  print_bytes(out, "workspace", workspace, cat(plan.options.max_batch_tokens, " rows a step"));
  print_bytes(out, "staging peak", m.staging_peak_bytes, "while loading");
  print_bytes(out, "needed in all",
              m.weights_bytes + std::max(m.kv_bytes + workspace, m.staging_peak_bytes), "");
}

Json to_json(const recipe::Recipe& recipe, const plan::PrecisionPlan& plan,
             const std::vector<Row>& rows, int64_t workspace) {
  const recipe::ModelConfig& c = recipe.config();
  Json json = {{"family", c.family},
               {"layers", c.layers},
               {"hidden_size", c.hidden_size},
               {"experts", c.experts},
               {"top_k", c.top_k},
               {"vocab_size", c.vocab_size},
               {"mtp_present", recipe.mtp_present()},
               {"notices", recipe.notices()}};
  for (const Row& r : rows) {
    json["parts"].push_back({{"part", r.part},
                             {"format", r.format},
                             {"dialect", r.dialect},
                             {"shape", r.shape},
                             {"count", r.count},
                             {"stored_bytes", r.stored_bytes},
                             {"resident_bytes", r.resident_bytes}});
  }
  const plan::MemoryPlan& m = plan.memory;
  json["plan"] = {{"ranks", plan.options.ranks},
                  {"weights_by_format", m.weights_by_format},
                  {"weights_bytes", m.weights_bytes},
                  {"mtp_bytes", m.mtp_bytes},
                  {"kv_bytes_per_token", m.kv_bytes_per_token},
                  {"kv_bytes", m.kv_bytes},
                  {"workspace_bytes", workspace},
                  {"staging_peak_bytes", m.staging_peak_bytes}};
  return json;
}

Json to_json(const plan::CudaPlan& plan) {
  return {{"weights_by_format", plan.weights_by_format},
          {"weights_bytes", plan.weights_bytes},
          {"kv_bytes_per_token", plan.kv_bytes_per_token},
          {"kv_bytes", plan.kv_bytes},
          {"device_staging_bytes", plan.device_staging_bytes},
          {"host_staging_bytes", plan.host_staging_bytes}};
}

// Bytes by part and format, as stored.
Chart bytes_chart(const std::vector<Row>& rows) {
  std::map<std::string, int64_t> sums;
  for (const Row& row : rows) sums[cat(row.part, ", ", row.format)] += row.stored_bytes;
  Chart chart{"Bytes by part and format", "As stored, scales included.", {}};
  for (const auto& [label, bytes] : sums) {
    chart.bars.push_back({label, bytes_text(bytes), static_cast<double>(bytes)});
  }
  std::stable_sort(chart.bars.begin(), chart.bars.end(),
                   [](const Bar& a, const Bar& b) { return a.value > b.value; });
  return chart;
}

std::string headline(const recipe::ModelConfig& c, bool mtp) {
  return cat(c.family, ", ", c.layers, " layers (", c.first_dense_layers, " dense), ", c.experts,
             " experts, top ", c.top_k, ", ", c.shared_experts, " shared, hidden ", c.hidden_size,
             ", vocabulary ", c.vocab_size, ", MTP layer ", mtp ? "stored" : "absent");
}

int run_inspect(const Options& options, std::ostream& out, std::ostream& err) {
  Result<recipe::Recipe> recipe = recipe::read_recipe(options.directory);
  if (!recipe) return fail(err, "inspect", recipe.error());
  plan::PlanOptions plan_options;
  plan_options.ranks = options.ranks;
  plan_options.activations = parse_activations(options.activations);
  plan_options.max_context = options.context;
  plan_options.threads = usable_cores();
  plan_options.scales = parse_scales(options.scales);
  Result<plan::PrecisionPlan> plan = plan::make_plan(*recipe, plan_options);
  if (!plan) return fail(err, "inspect", plan.error());
  const recipe::ModelConfig& c = recipe->config();
  std::optional<plan::CudaPlan> cuda;
  if (options.device == "cuda") {
    if (options.ranks > 1) {
      return fail(err, "inspect", Error(Code::kUnsupported, "--tp with --device cuda"));
    }
    Result<plan::CudaPlan> planned = plan::make_cuda_plan(*recipe, plan_options);
    if (!planned) return fail(err, "inspect", planned.error());
    cuda = std::move(*planned);
  }
  const int64_t workspace =
      model::workspace_bytes(c, plan_options.max_batch_tokens, 64, plan_options.threads);
  const std::vector<Row> rows = table(*recipe, *plan);
  std::vector<load::ScaleReport> scales;
  if (plan_options.scales == plan::Scales::kCsf) {
    ThreadPool pool(plan_options.threads);
    Result<std::vector<load::ScaleReport>> measured = load::measure_scales(*recipe, *plan, pool);
    if (!measured) return fail(err, "inspect", measured.error());
    scales = std::move(*measured);
  }
  const std::string model = headline(c, recipe->mtp_present());
  if (!options.html.empty()) {
    std::vector<Chart> charts = {bytes_chart(rows)};
    if (!scales.empty()) {
      for (Chart& chart : scale_charts(scales)) charts.push_back(std::move(chart));
    }
    const Result<void> written =
        write_file_atomic(options.html, html_page(options.directory, {model}, charts));
    if (!written) return fail(err, "inspect", written.error());
  }
  if (options.json) {
    Json json = to_json(*recipe, *plan, rows, workspace);
    if (plan_options.scales == plan::Scales::kCsf) json["scales"] = scale_json(scales);
    if (cuda) json["cuda_plan"] = to_json(*cuda);
    out << json_dump(json, 2) << '\n';
    return 0;
  }
  out << options.directory << ": " << model << "\nexperts: " << expert_formats(*plan) << "\n\n";
  print_table(out, rows);
  if (cuda) {
    print_plan(out, *cuda);
  } else {
    print_plan(out, *plan, workspace);
  }
  if (plan_options.scales == plan::Scales::kCsf) print_scale_table(out, scales);
  out << "\nmissing tensors: none\n";  // a missing one is an error above
  for (const std::string& notice : recipe->notices()) out << "note: " << notice << '\n';
  return 0;
}

}  // namespace

RunFn add_inspect(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.add_option("DIR", options->directory, "checkpoint directory")->required();
  app.add_flag("--json", options->json, "machine-readable output");
  app.add_option("--tp", options->ranks, "plan for this many tensor-parallel ranks")
      ->check(CLI::PositiveNumber);
  app.add_option("-c,--ctx-size", options->context, "tokens of KV cache to plan (0: the model's)");
  app.add_option("--scales", options->scales, "also encode the block scales and say what they take")
      ->check(CLI::IsMember({"plain", "csf"}));
  app.add_option("--device", options->device, "whose memory to plan; no GPU is needed")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--html", options->html, "write a page with plots to this file");
  app.add_option("--activations", options->activations, "KV cache and products")
      ->check(CLI::IsMember({"f32", "bf16"}));
  return
      [options](std::ostream& out, std::ostream& err) { return run_inspect(*options, out, err); };
}

}  // namespace nibble::cli
