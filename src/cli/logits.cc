// nibble logits DIR --tokens ... --out FILE: logits of every position, as a safetensors file, for
// comparing with any other implementation.
#include <cstring>
#include <filesystem>
#include <ostream>

#include "base/file.h"
#include "base/json.h"
#include "cli/command.h"
#include "cli/session.h"
#include "cli/token_source.h"

namespace nibble::cli {
namespace {

struct Options {
  ModelOptions model;
  std::string tokens, out;
  bool hidden = false;
};

// A safetensors file of F32 and I64 tensors, written whole or not at all.
class TensorFile {
 public:
  void add(const std::string& name, const char* dtype, std::vector<int64_t> shape, const void* data,
           size_t bytes) {
    header_[name] = {{"dtype", dtype},
                     {"shape", std::move(shape)},
                     {"data_offsets", {body_.size(), body_.size() + bytes}}};
    body_.append(static_cast<const char*>(data), bytes);
  }
  Result<void> write(const std::string& path) const {
    std::string header = json_dump(header_);
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const uint64_t length = header.size();
    std::string file(reinterpret_cast<const char*>(&length), sizeof(length));
    return write_file_atomic(path, file + header + body_);
  }

 private:
  Json header_ = Json::object();
  std::string body_;
};

Result<void> run(const Options& options, std::ostream& err) {
  NIBBLE_TRY(const std::vector<int32_t> tokens, read_tokens(options.tokens));
  runtime::EngineOptions engine_options;
  engine_options.max_sequences = 1;
  NIBBLE_TRY(const std::unique_ptr<runtime::Engine> engine,
             open_engine(options.model, engine_options, err));
  std::vector<float> logits, hidden;
  NIBBLE_TRY(prompt_logits(*engine, tokens,
                           [&](int64_t, std::span<const float> row, std::span<const float> state) {
                             logits.insert(logits.end(), row.begin(), row.end());
                             if (options.hidden)
                               hidden.insert(hidden.end(), state.begin(), state.end());
                           }));
  const int64_t rows = static_cast<int64_t>(tokens.size());
  const std::vector<int64_t> ids(tokens.begin(), tokens.end());
  TensorFile file;
  file.add("input_ids", "I64", {rows}, ids.data(), ids.size() * sizeof(int64_t));
  file.add("logits", "F32", {rows, static_cast<int64_t>(logits.size()) / rows}, logits.data(),
           logits.size() * sizeof(float));
  if (options.hidden) {
    file.add("final_hidden", "F32", {rows, static_cast<int64_t>(hidden.size()) / rows},
             hidden.data(), hidden.size() * sizeof(float));
  }
  return file.write(options.out);
}

}  // namespace

RunFn add_logits(CLI::App& app) {
  auto options = std::make_shared<Options>();
  add_model_options(app, options->model);
  app.add_option("--tokens", options->tokens, "ids as 1,2,3 or a file of them")->required();
  app.add_option("--out", options->out, "safetensors file to write")->required();
  app.add_flag("--hidden", options->hidden, "also the final-norm output, as final_hidden");
  return [options](std::ostream&, std::ostream& err) {
    const Result<void> done = run(*options, err);
    return done ? 0 : fail(err, "logits", done.error());
  };
}

}  // namespace nibble::cli
