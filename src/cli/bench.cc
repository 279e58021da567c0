// nibble bench DIR: prompt processing (pp) and token generation (tg) as llama-bench times them: pp
// is one prompt of n random ids, tg is n single-token steps after a prompt of -d ids (at least
// one), no sampling filters. tg rows also count what a token reads, weights as stored and the keys
// and values of its context, and on a GPU their share of its copy bandwidth. One warm-up run of
// each is dropped. Several --scales are run in turn, so that a machine whose speed drifts treats
// them alike.
#include <chrono>
#include <cmath>
#include <iomanip>
#include <ostream>
#include <random>

#include "base/file.h"
#include "base/json.h"
#include "cli/bench_moe.h"
#include "cli/command.h"
#include "cli/session.h"
#include "device/cuda.h"
#include "recipe/recipe.h"

namespace nibble::cli {
namespace {

struct Options {
  ModelOptions model;
  std::vector<int64_t> prompts = {512}, generations = {128}, threads = {0};
  std::vector<std::string> scales = {"plain"};
  std::vector<int64_t> depths = {0};
  int repeats = 5;
  bool json = false;
};

struct Measurement {
  std::string test, scales;
  int64_t threads = 0;
  double kv_bytes = 0;  // that a decode step reads, on average; 0: not decode
  std::vector<double> tokens_per_second;
};

/// What bounds a decode step of one token.
struct Roofline {
  double weights = 0;    // bytes it must read, as stored
  double bandwidth = 0;  // of the GPU's memory; 0 on the CPU
  double upload = 0;     // from page-locked host memory
};

// Every matrix once, of the experts the share that a token uses; no embedding, no MTP layer.
Result<double> weight_bytes_per_token(const std::string& directory) {
  NIBBLE_TRY(const recipe::Recipe recipe, recipe::read_recipe(directory));
  const recipe::ModelConfig& c = recipe.config();
  double bytes = 0;
  for (const auto& [key, weight] : recipe.weights()) {
    if (key.layer >= c.layers) continue;
    if (key.role == recipe::Role::kEmbedding && !c.tied_embeddings) continue;
    const auto stored = static_cast<double>(weight.codes.bytes + weight.stored_scale_bytes());
    bytes += key.expert < 0
                 ? stored
                 : stored * static_cast<double>(c.top_k) / static_cast<double>(c.experts);
  }
  return bytes;
}

using Clock = std::chrono::steady_clock;

std::vector<int32_t> random_ids(int64_t count, int64_t vocab, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    ids.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(vocab)));
  }
  return ids;
}

// Tokens per second of one run: a prompt of `prompt` ids, or with `generate` > 0 that many decode
// steps after that prompt and the first token.
Result<double> measure(runtime::Engine& engine, int64_t prompt, int64_t generate, uint64_t seed) {
  runtime::Request request;
  request.prompt = random_ids(prompt, engine.model().config().vocab_size, seed);
  request.max_tokens = generate > 0 ? generate + 1 : 1;
  Clock::time_point start = Clock::now(), end = start;
  int64_t seen = 0;
  std::string failure;
  request.callbacks.on_token = [&](const runtime::TokenEvent&) {
    end = Clock::now();
    if (generate > 0 && seen == 0) start = end;
    ++seen;
  };
  request.callbacks.on_finish = [&](runtime::FinishReason reason, const std::string& error) {
    if (reason == runtime::FinishReason::kError) failure = error;
  };
  NIBBLE_TRY(const runtime::RequestId id, engine.submit(std::move(request)));
  engine.wait(id);
  if (!failure.empty()) return Error(Code::kInternal, failure);
  const double seconds = std::chrono::duration<double>(end - start).count();
  return static_cast<double>(generate > 0 ? generate : prompt) / seconds;
}

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

double deviation_of(const std::vector<double>& values) {
  if (values.size() < 2) return 0;
  const double mean = mean_of(values);
  double sum = 0;
  for (const double v : values) sum += (v - mean) * (v - mean);
  return std::sqrt(sum / static_cast<double>(values.size() - 1));
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

void print(std::ostream& out, const Options& options, const std::vector<Measurement>& results,
           std::string_view isa, const Roofline& roofline) {
  if (options.json) {
    Json list = Json::array();
    for (const Measurement& m : results) {
      list.push_back({{"model", options.model.directory},
                      {"isa", isa},
                      {"activations", options.model.activations},
                      {"test", m.test},
                      {"scales", m.scales},
                      {"threads", m.threads},
                      {"weight_bytes_per_token", m.kv_bytes > 0 ? roofline.weights : 0.0},
                      {"kv_bytes_per_token", m.kv_bytes},
                      {"copy_bandwidth", roofline.bandwidth},
                      {"tokens_per_second", m.tokens_per_second},
                      {"mean", mean_of(m.tokens_per_second)},
                      {"median", median_of(m.tokens_per_second)},
                      {"sd", deviation_of(m.tokens_per_second)},
                      {"peak_rss_bytes", peak_rss_bytes()},
                      {"version", NIBBLE_VERSION}});
    }
    out << json_dump(list, 2) << '\n';
    return;
  }
  out << "| model | isa | activations | scales | threads | test | t/s (mean ± sd) | median | of "
      << options.scales[0] << " | weights GB/s | and KV | of copy |\n"
      << "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n"
      << std::fixed;
  double first = 0;  // median of the same test with the first of --scales
  for (const Measurement& m : results) {
    const double median = median_of(m.tokens_per_second);
    if (m.scales == options.scales[0]) first = median;
    out << std::setprecision(2) << "| " << options.model.directory << " | " << isa << " | "
        << options.model.activations << " | " << m.scales << " | " << m.threads << " | " << m.test
        << " | " << mean_of(m.tokens_per_second) << " ± " << deviation_of(m.tokens_per_second)
        << " | " << median << " | " << std::setprecision(3) << median / first << " | ";
    const double bytes = roofline.weights + m.kv_bytes;
    if (m.kv_bytes > 0) {
      out << std::setprecision(1) << median * roofline.weights / 1e9 << " | "
          << median * bytes / 1e9 << " | ";
    } else {
      out << "| | ";
    }
    if (m.kv_bytes > 0 && roofline.bandwidth > 0) {
      out << 100 * median * bytes / roofline.bandwidth << " %";
    }
    out << " |\n";
  }
  if (roofline.bandwidth > 0) {
    out << "\ncopy bandwidth " << std::setprecision(2) << roofline.bandwidth / 1e12 << " TB/s, "
        << bytes_text(static_cast<int64_t>(roofline.weights))
        << " of weights a token; page-locked memory to the GPU " << roofline.upload / 1e9
        << " GB/s\n";
  }
  out << "\npeak resident set " << bytes_text(peak_rss_bytes()) << ", nibble " << NIBBLE_VERSION
      << '\n';
}

Result<void> run(const Options& options, std::ostream& out, std::ostream& err) {
  std::vector<Measurement> results;
  NIBBLE_TRY(const device::Isa isa, device::choose_isa());
  std::string place(device::isa_name(isa));
  Roofline roofline;
  NIBBLE_TRY(roofline.weights, weight_bytes_per_token(options.model.directory));
  for (const int64_t threads : options.threads) {
    std::vector<std::unique_ptr<runtime::Engine>> engines;  // one for each of --scales
    for (const std::string& scales : options.scales) {
      ModelOptions model = options.model;
      model.threads = static_cast<int>(threads);
      model.scales = scales;
      runtime::EngineOptions engine_options;
      engine_options.max_sequences = 1;
      NIBBLE_TRY(std::unique_ptr<runtime::Engine> engine, open_engine(model, engine_options, err));
      engines.push_back(std::move(engine));
    }
    const auto add = [&](const std::string& test, int64_t prompt,
                         int64_t generate) -> Result<void> {
      std::vector<Measurement> list;
      const runtime::Engine& first = *engines[0];
      const double kv_bytes =
          generate == 0
              ? 0
              : static_cast<double>(
                    first.model().kv_geometry(first.options().activations).bytes_per_token()) *
                    (static_cast<double>(prompt) + static_cast<double>(generate + 1) / 2);
      for (const std::string& scales : options.scales) {
        list.push_back({test, scales, first.options().threads, kv_bytes, {}});
      }
      for (int i = -1; i < options.repeats; ++i) {  // -1 warms up
        for (size_t e = 0; e < engines.size(); ++e) {
          NIBBLE_TRY(const double speed,
                     measure(*engines[e], prompt, generate, static_cast<uint64_t>(i + 1)));
          if (i >= 0) list[e].tokens_per_second.push_back(speed);
        }
      }
      for (Measurement& m : list) results.push_back(std::move(m));
      return {};
    };
    for (const int64_t n : options.prompts) {
      if (n > 0) NIBBLE_TRY(add(cat("pp", n), n, 0));
    }
    for (const int64_t depth : options.depths) {
      const std::string at = depth > 0 ? cat("@d", depth) : "";
      for (const int64_t n : options.generations) {
        if (n > 0) NIBBLE_TRY(add(cat("tg", n, at), std::max<int64_t>(depth, 1), n));
      }
    }
    if (engines[0]->model().place() == model::Place::kCuda && roofline.bandwidth == 0) {
      place = "cuda";
      engines.clear();  // room for the copies
      NIBBLE_TRY(roofline.bandwidth, device::cuda_copy_bandwidth());
      NIBBLE_TRY(roofline.upload, device::cuda_upload_bandwidth());
    }
  }
  print(out, options, results, place, roofline);
  return {};
}

}  // namespace

RunFn add_bench(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.add_option("DIR", options->model.directory, "checkpoint directory");
  app.add_option("-p,--n-prompt", options->prompts, "prompt lengths (0: none)")->delimiter(',');
  app.add_option("-n,--n-gen", options->generations, "tokens to generate (0: none)")
      ->delimiter(',');
  app.add_option("-d,--n-depth", options->depths,
                 "prompt before the generated tokens (0: one token)")
      ->delimiter(',');
  app.add_option("-r,--repetitions", options->repeats, "timed runs of each")
      ->check(CLI::PositiveNumber);
  app.add_option("-t,--threads", options->threads, "thread counts to try (0: all)")->delimiter(',');
  app.add_option("--activations", options->model.activations, "what products are computed with")
      ->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--scales", options->scales, "plain, csf (losslessly compressed), or both in turn")
      ->delimiter(',')
      ->check(CLI::IsMember({"plain", "csf"}));
  add_device_option(app, options->model.device);
  app.add_flag("--json", options->json, "machine-readable output");
  app.add_flag("-q,--quiet", options->model.quiet, "no plan lines on stderr");
  CLI::App* moe = app.add_subcommand("moe", "time fused MoE layers of a shape on a GPU");
  const RunFn run_moe = add_bench_moe(*moe);
  return [options, moe, run_moe](std::ostream& out, std::ostream& err) {
    if (moe->parsed()) return run_moe(out, err);
    const Result<void> done =
        options->model.directory.empty()  // required(), but not by the subcommand
            ? Error(Code::kInvalidArgument, "DIR is required")
            : run(*options, out, err);
    return done ? 0 : fail(err, "bench", done.error());
  };
}

}  // namespace nibble::cli
