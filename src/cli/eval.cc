// nibble eval DIR --text FILE: perplexity; with --against, KL divergence of the full-vocabulary
// distributions, KL(reference || this checkpoint), in nats.
//
// Protocol: the text is tokenized as one string without special tokens; windows of --ctx ids start
// every --stride ids (default: --ctx, so none overlap); every window runs alone from position 0,
// and its tokens 1 .. ctx-1 are scored (with an overlap, only those not scored by the window
// before).
#include <algorithm>
#include <cmath>
#include <iomanip>
#include <ostream>

#include "base/file.h"
#include "base/json.h"
#include "cli/command.h"
#include "cli/session.h"
#include "cli/token_source.h"
#include "recipe/container.h"
#include "text/tokenizer.h"

namespace nibble::cli {
namespace {

struct Options {
  ModelOptions model;
  std::string text, against;
  int64_t ctx = 512, stride = 0, windows = 0;
  bool json = false;
};

struct Window {
  int64_t begin, scored_from;  // first scored target inside the window
};

struct Scores {
  double nll = 0;
  int64_t tokens = 0, bytes = 0;
  std::vector<double> window_nll;  // mean of each window
  std::vector<float> kl;
  double reference_nll = 0;
  int64_t same_top = 0, nan_rows = 0;
};

double log_sum_exp(std::span<const float> logits) {
  const float top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float v : logits) sum += std::exp(static_cast<double>(v - top));
  return static_cast<double>(top) + std::log(sum);
}

// KL(p || q) and whether both have the same most probable token.
std::pair<double, bool> divergence(std::span<const float> p, std::span<const float> q) {
  const double zp = log_sum_exp(p), zq = log_sum_exp(q);
  double sum = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    const double lp = static_cast<double>(p[i]) - zp;
    sum += std::exp(lp) * (lp - (static_cast<double>(q[i]) - zq));
  }
  const auto top = [](std::span<const float> v) {
    return std::max_element(v.begin(), v.end()) - v.begin();
  };
  return {std::max(sum, 0.0), top(p) == top(q)};
}

bool any_nan(std::span<const float> values) {
  return std::any_of(values.begin(), values.end(), [](float v) { return std::isnan(v); });
}

std::vector<Window> windows_of(const Options& options, int64_t tokens) {
  const int64_t stride = options.stride > 0 ? options.stride : options.ctx;
  std::vector<Window> list;
  int64_t scored_end = 0;
  for (int64_t begin = 0; begin + options.ctx <= tokens; begin += stride) {
    if (options.windows > 0 && static_cast<int64_t>(list.size()) == options.windows) break;
    list.push_back({begin, std::max<int64_t>(1, scored_end - begin)});
    scored_end = begin + options.ctx;
  }
  return list;
}

Result<void> score_window(const Options& options, runtime::Engine& engine,
                          runtime::Engine* reference, std::span<const int32_t> ids,
                          const Window& window, Scores& scores) {
  const int64_t vocab = engine.model().config().vocab_size;
  std::vector<float> expected;  // the reference's logits of this window
  if (reference != nullptr) {
    expected.reserve(static_cast<size_t>(options.ctx * vocab));
    NIBBLE_TRY(prompt_logits(*reference, ids, [&](int64_t, std::span<const float> row, auto) {
      expected.insert(expected.end(), row.begin(), row.end());
    }));
  }
  double nll = 0;
  int64_t count = 0;
  NIBBLE_TRY(prompt_logits(engine, ids, [&](int64_t position, std::span<const float> row, auto) {
    const int64_t target = position + 1;
    if (target >= static_cast<int64_t>(ids.size()) || target < window.scored_from) return;
    const int32_t id = ids[static_cast<size_t>(target)];
    const std::span<const float> ref =
        reference == nullptr ? std::span<const float>()
                             : std::span(expected).subspan(static_cast<size_t>(position * vocab),
                                                           static_cast<size_t>(vocab));
    if (any_nan(row) || any_nan(ref)) {
      ++scores.nan_rows;
      return;
    }
    nll += log_sum_exp(row) - static_cast<double>(row[static_cast<size_t>(id)]);
    ++count;
    if (reference == nullptr) return;
    const auto [kl, same] = divergence(ref, row);
    scores.kl.push_back(static_cast<float>(kl));
    scores.same_top += same ? 1 : 0;
    scores.reference_nll += log_sum_exp(ref) - static_cast<double>(ref[static_cast<size_t>(id)]);
  }));
  scores.nll += nll;
  scores.tokens += count;
  scores.window_nll.push_back(count > 0 ? nll / static_cast<double>(count) : 0);
  return {};
}

double percentile(const std::vector<float>& sorted, double p) {
  const size_t i = static_cast<size_t>(p / 100.0 * static_cast<double>(sorted.size() - 1) + 0.5);
  return static_cast<double>(sorted[i]);
}

// Half width of the 95 % interval of the perplexity, from the spread of the windows.
double interval(const Scores& scores) {
  const double n = static_cast<double>(scores.window_nll.size());
  if (n < 2) return 0;
  double mean = 0, sum = 0;
  for (const double v : scores.window_nll) mean += v / n;
  for (const double v : scores.window_nll) sum += (v - mean) * (v - mean);
  return 1.96 * std::exp(mean) * std::sqrt(sum / (n - 1) / n);
}

Json summary(const Options& options, Scores& scores) {
  const double mean = scores.nll / static_cast<double>(scores.tokens);
  Json json = {{"model", options.model.directory},
               {"activations", options.model.activations},
               {"ctx", options.ctx},
               {"stride", options.stride > 0 ? options.stride : options.ctx},
               {"windows", scores.window_nll.size()},
               {"tokens", scores.tokens},
               {"nan_positions", scores.nan_rows},
               {"mean_nll", mean},
               {"perplexity", std::exp(mean)},
               {"perplexity_ci95", interval(scores)},
               {"bits_per_byte", scores.nll / std::log(2.0) / static_cast<double>(scores.bytes)},
               {"perplexity_per_byte", std::exp(scores.nll / static_cast<double>(scores.bytes))}};
  if (!scores.kl.empty()) {
    std::sort(scores.kl.begin(), scores.kl.end());
    double sum = 0;
    for (const float v : scores.kl) sum += static_cast<double>(v);
    const double n = static_cast<double>(scores.kl.size());
    json["against"] = options.against;
    json["reference_perplexity"] = std::exp(scores.reference_nll / n);
    json["kld"] = {{"mean", sum / n},
                   {"median", percentile(scores.kl, 50)},
                   {"p95", percentile(scores.kl, 95)},
                   {"p99", percentile(scores.kl, 99)},
                   {"max", static_cast<double>(scores.kl.back())},
                   {"same_top1_percent", 100.0 * static_cast<double>(scores.same_top) / n}};
  }
  return json;
}

void print_text(std::ostream& out, const Json& s) {
  out << std::fixed << std::setprecision(4) << "perplexity " << s["perplexity"].get<double>()
      << " +- " << s["perplexity_ci95"].get<double>() << " per token (mean NLL "
      << std::setprecision(6) << s["mean_nll"].get<double>() << ", " << s["tokens"] << " tokens in "
      << s["windows"] << " windows of " << s["ctx"] << ", stride " << s["stride"] << ")\n"
      << std::setprecision(4) << "per byte: perplexity " << s["perplexity_per_byte"].get<double>()
      << ", " << s["bits_per_byte"].get<double>() << " bits\n";
  if (s.contains("kld")) {
    const Json& k = s["kld"];
    out << "against " << s["against"].get<std::string>() << " (perplexity "
        << s["reference_perplexity"].get<double>() << "): KLD mean " << std::setprecision(6)
        << k["mean"].get<double>() << ", median " << k["median"].get<double>() << ", p95 "
        << k["p95"].get<double>() << ", p99 " << k["p99"].get<double>() << ", max "
        << k["max"].get<double>() << "; same top-1 " << std::setprecision(2)
        << k["same_top1_percent"].get<double>() << " %\n";
  }
  if (s["nan_positions"].get<int64_t>() > 0) {
    out << "positions left out because of NaN: " << s["nan_positions"] << '\n';
  }
}

Result<void> run(const Options& options, std::ostream& out, std::ostream& err) {
  NIBBLE_TRY(const text::Tokenizer tokenizer,
             text::Tokenizer::open(recipe::config_directory(options.model.directory)));
  NIBBLE_TRY(const std::string text, read_text_file(options.text));
  const std::vector<int32_t> ids = tokenizer.encode(text);
  const std::vector<Window> windows = windows_of(options, static_cast<int64_t>(ids.size()));
  if (windows.empty()) {
    return Error(Code::kInvalidArgument, cat("'", options.text, "' has ", ids.size(),
                                             " tokens, fewer than one window of ", options.ctx));
  }
  runtime::EngineOptions engine_options;
  engine_options.max_sequences = 1;
  engine_options.max_logit_rows = engine_options.max_batch_tokens;
  ModelOptions model = options.model;
  model.context = options.ctx;
  NIBBLE_TRY(const std::unique_ptr<runtime::Engine> engine,
             open_engine(model, engine_options, err));
  std::unique_ptr<runtime::Engine> reference;
  if (!options.against.empty()) {
    model.directory = options.against;
    NIBBLE_TRY(reference, open_engine(model, engine_options, err));
    const int64_t a = engine->model().config().vocab_size;
    const int64_t b = reference->model().config().vocab_size;
    if (a != b) {
      return Error(Code::kInvalidArgument,
                   cat("vocabularies differ: ", options.model.directory, " has ", a, " tokens, ",
                       options.against, " has ", b));
    }
  }
  Scores scores;
  for (const Window& window : windows) {
    const std::span<const int32_t> part =
        std::span(ids).subspan(static_cast<size_t>(window.begin), static_cast<size_t>(options.ctx));
    NIBBLE_TRY(score_window(options, *engine, reference.get(), part, window, scores));
    for (size_t i = static_cast<size_t>(window.scored_from); i < part.size(); ++i) {
      scores.bytes += static_cast<int64_t>(tokenizer.token_bytes(part[i]).size());
    }
  }
  if (scores.tokens == 0) return Error(Code::kInternal, "every position's logits are NaN");
  const Json result = summary(options, scores);
  if (options.json) {
    out << json_dump(result, 2) << '\n';
  } else {
    print_text(out, result);
  }
  return {};
}

}  // namespace

RunFn add_eval(CLI::App& app) {
  auto options = std::make_shared<Options>();
  add_model_options(app, options->model);
  app.remove_option(app.get_option("--ctx-size"));
  app.add_option("--text", options->text, "text file")->required();
  app.add_option("-c,--ctx", options->ctx, "tokens of a window")->check(CLI::Range(2, 1 << 20));
  app.add_option("--stride", options->stride, "tokens between window starts (0: --ctx)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--windows", options->windows, "use only the first N windows (0: all)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--against", options->against, "reference checkpoint for the KL divergence");
  app.add_flag("--json", options->json, "machine-readable output");
  return [options](std::ostream& out, std::ostream& err) {
    const Result<void> done = run(*options, out, err);
    return done ? 0 : fail(err, "eval", done.error());
  };
}

}  // namespace nibble::cli
